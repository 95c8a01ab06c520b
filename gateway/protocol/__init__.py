"""Bytes and values of the wire, without I/O: API bodies, HTTP framing, the SSE relay, errors,
service classes.
"""

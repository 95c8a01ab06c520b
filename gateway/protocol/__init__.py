"""Protocol code without I/O: API bodies, HTTP framing, the SSE relay, errors and service
classes.
"""

"""Responses, without I/O: HTTP framing, the relay to the client, and the record for a resume."""

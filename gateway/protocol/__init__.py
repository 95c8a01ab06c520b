"""Protocol code without I/O: API bodies, HTTP framing, server-sent events and errors."""

"""Requests, without I/O: the head, the headers that the gateway reads, and the body as a Call."""

"""Parsing of requests, without I/O: the head, the headers that the gateway uses, and the body."""

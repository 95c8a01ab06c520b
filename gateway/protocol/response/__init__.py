"""Processing of responses, without I/O: HTTP framing, relaying to the client, and resuming."""

"""One HTTP request to one engine: forward its answer, or hedge it at a second endpoint."""

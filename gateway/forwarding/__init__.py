"""One HTTP request to one engine: forwarding its answer, and hedging it at a second endpoint."""

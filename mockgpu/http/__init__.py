"""The mock engine's HTTP server: vLLM's APIs, their formats, and routes for state and faults."""

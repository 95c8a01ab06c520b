"""A mock TP group without a GPU: roofline, continuous batching, paged KV, and vLLM's HTTP API.

Nothing here imports the gateway. The gateway's command line imports `mockgpu.cli` lazily, and the
planner imports the pure parts.
"""

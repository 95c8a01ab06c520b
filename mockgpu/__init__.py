"""A believable TP group without a GPU: roofline, continuous batching, paged KV, and vLLM's HTTP dialect.

Nothing here knows the gateway; the gateway's command line imports `mockgpu.cli` lazily, the planner imports
the pure parts.
"""

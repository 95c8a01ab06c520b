"""A simulated LLM engine (a "TP group": one engine process on several GPUs) that needs no GPU.

It models step times (roofline), continuous batching and paged KV, and serves vLLM's HTTP API.
Nothing here imports the gateway. The gateway's command line imports `mockgpu.cli` lazily, and the
planner imports the modules without I/O.
"""

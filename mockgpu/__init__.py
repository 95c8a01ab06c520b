"""A simulated LLM engine that needs no GPU, for tests, demonstrations and planning.

It imitates one engine process on several GPUs (a TP group): its step times, scheduler, KV cache and
HTTP API, which is vLLM's. Nothing here imports the gateway. The gateway's command line imports
`mockgpu.cli` when it is needed, and the planner imports the modules without I/O.
"""

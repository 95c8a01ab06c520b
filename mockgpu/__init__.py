"""A simulated LLM engine that needs no GPU: its step times, scheduler, KV cache and HTTP API.

It imitates a TP group, one engine process on several GPUs, with vLLM's HTTP API. Nothing here
imports the gateway. The gateway's command line imports `mockgpu.cli` lazily, and the planner
imports the modules without I/O.
"""

"""Publishes the KV events of a mock engine: which blocks enter and leave its prefix cache.

Gateways use them to route requests to engines that have cached their prompts. Events are sent in
batches over ZeroMQ, in vLLM's or SGLang's format. Missed batches can be requested again.
"""

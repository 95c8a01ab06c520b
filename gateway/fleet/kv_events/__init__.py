"""KV events: messages in which engines report every change of their prefix caches.

The gateway builds an index from them. Where an engine publishes KV events, the gateway knows which
prompts are cached, and need not predict it.
"""

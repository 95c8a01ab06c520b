"""The plug-in (KV connector) for vLLM 0.32.

Only connector.py and cache_memory.py import vLLM; the other modules do not need it.
"""

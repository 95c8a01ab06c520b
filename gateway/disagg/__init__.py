"""Serves one request with two engines: one computes the prompt (prefill), the other decodes.

policies.pricing.split_decision decides whether to split a request, and between which endpoints.
kvtransfer.dialects has the protocols by which engines transfer the prompt's KV cache.
"""

"""Serves one request by a prefill and a decode endpoint, and handles every way in which it can end.

policies.pricing.split decides whether to split a request and between which endpoints.
kvtransfer.dialects knows how engines transfer the KV cache.
"""

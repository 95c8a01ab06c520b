"""Serves one request by a prefill and a decode endpoint, and handles all outcomes of the two
requests.

policies.pricing.split_decision decides whether to split a request and between which endpoints.
kvtransfer.dialects knows how engines transfer the KV cache.
"""

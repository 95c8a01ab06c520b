"""One request over a prefill and a decode endpoint, with every way in which it can end.

Not here: whether to split and between which endpoints (policies.pricing.split), and the engines'
handoffs (kvtransfer.dialects).
"""

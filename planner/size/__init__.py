"""The command `penstock size`: computes how many GPUs a model and its latency promises need,
and why.
"""

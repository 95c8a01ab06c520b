"""The command `penstock size`: computes a fleet for a model and latency promises, and gives
reasons.
"""

"""The command `penstock size`: computes a fleet for a model and promised latencies, and gives
reasons.
"""

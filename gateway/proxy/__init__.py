"""Sends requests to endpoints, with retries: whole, split, or the rest of a broken stream.

If the requested model has no capacity, it may choose a smaller one.
"""

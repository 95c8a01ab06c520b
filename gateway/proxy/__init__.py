"""Sends requests to endpoints, with retries: whole ones, split ones, and the rest of broken
streams.

If the requested model has no capacity, it may choose a smaller one.
"""

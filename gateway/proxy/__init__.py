"""The attempt loop and its plans: whole requests, split requests, and the rest of broken streams.

It also chooses a smaller model where the requested one has no capacity.
"""

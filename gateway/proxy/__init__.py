"""The attempt loop, and its plans for whole requests, split requests and broken streams.

Also chooses a smaller model where the requested one has no capacity.
"""

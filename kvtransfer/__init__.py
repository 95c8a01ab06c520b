"""KV cache between TP groups. So far its vocabulary: what is moved (layout.py), by whose leave (lease.py), in which
frames (frame.py). No I/O here, and nothing of the gateway.
"""

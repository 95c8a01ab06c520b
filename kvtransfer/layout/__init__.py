"""How KV lies in the memory of an engine's GPUs, and which bytes go where in another engine's
memory.
"""

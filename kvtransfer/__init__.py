"""KV cache between TP groups: an Agent (agent.py) that an engine embeds offers blocks to peers and fetches theirs.

What is moved where is pure (layout.py, reshard.py), who may and when is decided without I/O (source.py, sink.py), bytes
move in transports/. dialects/ is the gateway's side: how each engine wants to be told. Nothing of the gateway here.
"""

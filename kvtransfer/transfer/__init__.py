"""The logic of KV transfers without I/O: offers at the source (sender), fetches at the sink
(receiver).
"""

"""The links (connections to peers) of one agent: how they are dialled, proven, kept alive and
lost.
"""

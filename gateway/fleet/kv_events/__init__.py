"""KV events: messages of engines about changes of their prefix caches, and the exact index made of
them.
"""

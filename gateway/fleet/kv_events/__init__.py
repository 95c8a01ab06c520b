"""KV events: engines' messages about changes of their prefix caches, and the exact index made from
them.
"""

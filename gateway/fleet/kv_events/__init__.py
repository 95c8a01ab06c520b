"""KV events: what engines publish about their prefix caches, and the exact index made from it."""

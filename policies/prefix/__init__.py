"""Prompts as chains of block keys, and the index of what endpoints hold of them."""

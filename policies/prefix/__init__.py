"""Prompts as chains of block hashes, and an index of the prefixes that endpoints have cached."""

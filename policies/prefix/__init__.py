"""Prompts as chains of block hashes, and the prefixes that endpoints have cached."""

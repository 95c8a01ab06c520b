"""Represents prompts as chains of block hashes, and indexes the prefixes that endpoints have
cached.
"""

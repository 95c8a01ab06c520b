"""Represents prompts as chains of block hashes, and records which prefixes endpoints have
cached.
"""

"""Compares the answers of two engines to the same prompts, as plain functions without I/O."""

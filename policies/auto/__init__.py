"""Chooses a pool's routing policy automatically, by simulating policies on recent requests."""

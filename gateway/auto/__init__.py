"""Automatic policy selection: chooses a pool's routing policy by replaying its recent requests."""

"""Automatic choice of a pool's routing policy, by estimates of goodput on its recent requests."""

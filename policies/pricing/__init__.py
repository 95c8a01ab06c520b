"""Computes prices: the expected cost of serving a request whole, split, or with a smaller model."""

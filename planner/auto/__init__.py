"""Replay of the last minutes of an access log through a portfolio of routing policies."""

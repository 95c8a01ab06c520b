"""Compares routing policies by replaying the last minutes of an access log with each of them."""

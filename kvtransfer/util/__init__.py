"""Helpers for KV transfers: clocks, locks, and options."""

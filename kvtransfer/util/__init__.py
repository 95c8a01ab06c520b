"""Helpers for all parts of the KV transfer layer: clocks, locks, options, and a map with expiry."""

"""Helpers for KV transfers: clocks, locks, options, and a map whose entries expire."""

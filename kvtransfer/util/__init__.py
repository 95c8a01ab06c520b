"""Helpers for KV transfers: clocks, locks, and the options of an agent."""

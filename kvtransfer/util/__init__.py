"""Clocks, locks, options, and other helpers that every part of the transfer layer uses."""

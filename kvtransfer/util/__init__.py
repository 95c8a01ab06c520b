"""Helpers of all parts of the transfer layer: clocks, locks, options, and a map with expiry."""

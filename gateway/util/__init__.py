"""Small helpers that are independent of requests: units, addresses, TLS contexts, the version."""

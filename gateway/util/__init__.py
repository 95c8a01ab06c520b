"""Small helpers that know nothing of requests: units, addresses, TLS contexts, the version."""

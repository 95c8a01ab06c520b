"""The gateway process: HTTP servers and clients, the live state of endpoints, the admin server.

Routing decisions are made in policies/, and kvtransfer/ has the code that moves KV cache.
"""

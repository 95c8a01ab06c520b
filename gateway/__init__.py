"""The gateway process: HTTP servers and clients, the live state of the endpoints, and the admin
API.

Routing decisions are made in policies/; KV cache is moved by kvtransfer/.
"""

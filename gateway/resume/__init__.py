"""Continues a broken stream at another endpoint, token for token, or not at all.

protocol/resume_terms.py decides whether a request can be continued, protocol/token_ledger.py
records the tokens that the client has received, and proxy/rest.py requests the rest from the next
endpoint.
"""

"""Continues a broken stream at another endpoint, token for token, or else not at all.

gateway/protocol/resume_terms.py decides whether a request can be continued,
gateway/protocol/token_ledger.py records the tokens that the client has received, and
gateway/proxy/rest.py asks the next endpoint for the rest.
"""

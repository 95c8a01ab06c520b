"""Continue a broken stream on another endpoint, token for token, or not at all.

terms.py decides whether a request can be continued, ledger.py records the tokens that the client
has received, and going_on.py asks the next endpoint for the rest.
"""

"""Streams that outlive their engine: what was said so far is continued elsewhere, token for token, or not at all.

terms.py says whether a request can be continued, ledger.py keeps what was said and shows it to the client, going_on.py
asks the next endpoint for the rest.
"""

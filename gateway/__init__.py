"""The process: HTTP in, HTTP out, live state, admin. Decisions live in policies/, KV movement in
kvtransfer/.
"""

"""A KV transport over RDMA queue pairs, each accompanied by a TCP connection for control
messages.
"""

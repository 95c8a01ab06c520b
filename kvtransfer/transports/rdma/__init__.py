"""A KV transport over RDMA, with a TCP connection for control messages beside each queue pair.

A queue pair is one end of an RDMA connection.
"""

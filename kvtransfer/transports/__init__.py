"""KV transports, which move bytes from one agent's memory into another's: inproc, shm, tcp,
rdma.
"""

"""Transports: how bytes get from one agent's memory into another's (inproc, shm, tcp, rdma)."""

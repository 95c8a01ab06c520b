"""The ways to move KV bytes from one agent's memory to another's: inproc, shm, tcp and rdma."""

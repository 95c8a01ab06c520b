"""KV transports, which copy bytes from one agent's memory to another's: inproc, shm, tcp, rdma."""

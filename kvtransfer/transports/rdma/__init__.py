"""Transport over RDMA queue pairs, each accompanied by a TCP connection for control messages."""

"""Links over RDMA queue pairs, with a TCP connection beside each."""

"""A KV transport over RDMA; control messages go over a TCP connection beside it."""

"""HTTP and TLS over sockets: client connections, connections to engines, and the write queue."""

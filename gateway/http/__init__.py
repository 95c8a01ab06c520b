"""Sockets: client connections, connections to engines, write queues, and TLS on both sides."""

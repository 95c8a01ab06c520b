"""Connections between agents over stream sockets, each with a thread that sends and receives."""

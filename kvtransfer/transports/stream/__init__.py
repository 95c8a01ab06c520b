"""Links over stream sockets, each with a thread that sends and receives."""

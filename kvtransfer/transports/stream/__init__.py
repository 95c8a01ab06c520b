"""Links over stream sockets: what one thread sends and receives."""

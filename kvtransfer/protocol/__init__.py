"""What two agents send to each other: formats of messages, identities and permissions. No I/O."""

"""The protocol between two agents: frames, messages, tickets, sessions and leases. No I/O."""

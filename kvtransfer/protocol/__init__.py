"""Protocol between two agents: frames, messages, tickets, sessions, leases and outcomes, without
I/O.
"""

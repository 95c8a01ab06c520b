"""What two agents send to each other: frames, messages, tickets, sessions, leases, outcomes.
Sans-IO.
"""

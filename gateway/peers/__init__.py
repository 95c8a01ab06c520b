"""State exchange between gateways over a message bus: routed requests, reservations, health and
charges.

A gateway without contact to others decides by its own state. No request waits for the bus.
"""

"""State exchange between gateways: routed requests, reservations, health and charges, over a
message bus.

A gateway without contact to others decides by its own state: no request waits for the bus.
"""

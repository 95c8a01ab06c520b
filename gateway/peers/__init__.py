"""State exchange between gateways: picks, reservations, health and charges, sent over a bus.

A gateway without contact to others decides by its own state: no request waits for the bus.
"""

"""State exchange between gateways: routed prompts, reservations, health and charges of tenants.

The state is sent over a message bus. A gateway without contact to others uses the state that it
has. No request waits for the bus.
"""

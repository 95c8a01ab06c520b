"""`penstock doctor`: check engines and a configuration before they receive traffic.

probe.py sends requests to one engine, engine.py evaluates the responses, checklist.py evaluates a
fleet of TP groups for production, command.py prints. Nothing here runs while the gateway serves.
"""

"""`penstock doctor`: check engines and a configuration before they receive traffic.

probe.py sends requests to one engine, engine.py evaluates the responses, checklist.py evaluates all
endpoints for production, command.py prints the findings. Nothing here runs while the gateway
serves.
"""

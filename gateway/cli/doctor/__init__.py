"""`penstock doctor`: check engines and a configuration before they receive traffic.

- engine_probe.py sends requests to one engine, and engine_checks.py evaluates the responses.
- production_checklist.py evaluates all endpoints for production.
- command.py prints the findings.

Nothing here runs while the gateway serves.
"""

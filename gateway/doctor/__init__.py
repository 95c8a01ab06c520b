"""`penstock doctor`: what can be known of engines and of a configuration before traffic meets them.

probe.py asks one engine, engine.py judges what it said, checklist.py goes through what a fleet of TP groups should have
before production, cli.py prints. Nothing here is used while serving.
"""

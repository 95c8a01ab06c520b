"""`penstock doctor`: what can be known of engines and of a configuration before traffic meets them.

gateway/cli/doctor/probe.py asks one engine, gateway/cli/doctor/engine.py judges what it said, gateway/cli/doctor/checklist.py goes through what a fleet of TP groups should have
before production, gateway/cli/doctor/command.py prints. Nothing here is used while serving.
"""

"""Service discovery: endpoints listed by DNS, a file or Kubernetes, in addition to configured ones.

gateway/fleet/discovery/source.py defines what a source is. gateway/fleet/discovery/discovery.py
runs one source per pool and passes its endpoints to the endpoint table.
"""

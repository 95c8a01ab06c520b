"""Service discovery: endpoints that DNS, a file or Kubernetes list, besides the configured ones.

gateway/fleet/discovery/source.py defines what a source is. gateway/fleet/discovery/discovery.py
runs one per pool and hands its endpoints to the endpoint table.
"""

"""Service discovery: finds the endpoints of a pool in DNS, a file or Kubernetes.

The interface of a discovery source is in gateway/fleet/discovery/source.py. The class Discovery in
gateway/fleet/discovery/discovery.py runs one source per pool. It passes the endpoints that a source
finds to the endpoint table.
"""

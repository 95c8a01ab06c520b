"""Service discovery: finds the endpoints of a pool in DNS, a file or Kubernetes.

The interface of a discovery source is in source_interface.py. The class Discovery in discovery.py
runs one source per pool. It passes the endpoints that a source finds to the endpoint table.
"""

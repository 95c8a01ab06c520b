"""Who else is in a pool: endpoints that DNS, a file or Kubernetes name, besides those that stand in the configuration.

source.py says what a source is, discovery.py follows one per pool and hands what it finds to the endpoint table.
"""

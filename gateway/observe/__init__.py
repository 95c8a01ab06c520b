"""Observability: gauges read at a scrape, traces, and generated dashboards and rules.

Not here: the catalogue of metrics that these are generated from (gateway/metrics/catalogue.py).
"""

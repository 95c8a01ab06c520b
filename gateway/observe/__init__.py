"""Observability: gauges read at a scrape, traces, and generated dashboards and rules.

They are generated from the catalogue of metrics (gateway/metrics/catalogue.py).
"""

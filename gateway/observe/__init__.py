"""Observability: gauges read at a scrape, traces, and generated dashboards and rules.

Dashboards and rules are generated from the catalogue of metrics (gateway/metrics/catalogue.py).
"""

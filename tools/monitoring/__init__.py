"""Generators of Prometheus rules and Grafana dashboards from the catalogue of metrics."""

"""Generates Prometheus rules and Grafana dashboards from the list of the gateway's metrics."""

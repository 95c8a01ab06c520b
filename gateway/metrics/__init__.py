"""Metric types, the catalogue of metrics, and the text formats of a scrape."""

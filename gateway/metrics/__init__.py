"""The types of metrics, the catalogue of all metrics, and the text formats of a scrape."""

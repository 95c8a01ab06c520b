"""Endpoints: their table and registry, bookings, the view of their caches, health checks, scrapes,
discovery.
"""

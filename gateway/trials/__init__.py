"""Routing policies on trial: shadows only compute picks, canaries serve a share of requests."""

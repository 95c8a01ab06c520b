"""Routing rules of other systems by name, one small module per family: for comparison and for
migration.

Each is a parameter struct with the published defaults, and its docstring names the source.
Parameters keep their original names. Nothing here is our own invention, and nothing is tuned per
workload.
"""

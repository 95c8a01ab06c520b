"""Routing and admission rules of other systems, by name, for comparison and for migration.

There is one small module per family. Each rule is a parameter struct with the published defaults
and original parameter names, and its docstring names the source. Nothing is added or tuned per
workload.
"""

"""Routing and admission rules of other systems, for comparison and for migration.

There is one small module per family of rules. Each rule is a parameter struct with the published
defaults and the original parameter names. Its docstring has the source. Nothing is added, or tuned
to a workload.
"""

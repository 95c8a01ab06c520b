"""Development tools: they generate documentation, dashboards and alert rules, and compile modules.

They run in a checkout and are not part of the released packages.
"""

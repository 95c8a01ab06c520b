"""Generators of documents, dashboards and rules, and the build of compiled modules; not shipped."""

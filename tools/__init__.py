"""Generators of documents, dashboards and rules, and the tooling that compiles modules. Not shipped."""

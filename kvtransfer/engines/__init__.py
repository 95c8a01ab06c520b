"""Connectors that embed an Agent in a real engine, one package per engine."""

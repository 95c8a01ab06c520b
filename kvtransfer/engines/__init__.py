"""Connectors that embed a transfer Agent in a real engine, one package per engine."""

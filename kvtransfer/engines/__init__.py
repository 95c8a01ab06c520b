"""Plug-ins that embed a KV transfer agent in a real engine, one package per engine."""

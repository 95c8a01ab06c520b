"""Offline tools: generate load, read traces, replay them on virtual time, compare
configurations.
"""

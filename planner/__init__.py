"""Offline tools: generate load, read traces, replay them on virtual time, and test a changed
configuration on them.
"""

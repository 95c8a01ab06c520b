"""Connections between agents over TCP or Unix sockets. Each has a thread that sends and
receives.
"""

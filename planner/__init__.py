"""Offline: generate load, read traces, and (later) size a fleet, price it and replay a trace on virtual time."""

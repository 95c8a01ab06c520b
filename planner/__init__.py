"""Offline: generate load, read traces, replay them on virtual time; (later) size a fleet and price it."""

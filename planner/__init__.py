"""Offline: generate load, read traces, replay them on virtual time, try a changed configuration on them."""

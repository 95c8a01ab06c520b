"""Sends one request to one engine and forwards its answer; may also send it to a second engine."""

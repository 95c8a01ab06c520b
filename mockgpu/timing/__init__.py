"""Computes how long an engine step takes, from a roofline model, layouts and measurements."""

"""Seeing inside: what is asked of the gateway at a scrape, traces, and the boards and rules made from the catalogue.

Lives here: everything an operator's tools are given. Not here: the catalogue itself
(gateway/metrics.py).
"""

"""Admission control of a pool of endpoints: which requests enter, which wait and which are
refused.
"""

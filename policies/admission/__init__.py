"""Admission control of a pool of endpoints: which requests enter, which wait, which are refused."""

"""The command `penstock size`: from a model and promises to a fleet, with the reason for each
step.
"""

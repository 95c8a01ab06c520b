"""A model of one inference engine: its step times, queue and KV memory, learned from
observations.
"""

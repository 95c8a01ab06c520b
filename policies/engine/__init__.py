"""A model of one inference engine: step times, queue, KV, and factors learned from observations."""

"""The model of one engine: step times, queue, KV, and the corrections learnt from observations."""

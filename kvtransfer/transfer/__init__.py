"""The two ends of a KV transfer, without I/O: offers at the source, fetches at the sink."""

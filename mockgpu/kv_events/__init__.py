"""The KV events of a mock engine: batches in vLLM's format, published over ZeroMQ, with replays."""

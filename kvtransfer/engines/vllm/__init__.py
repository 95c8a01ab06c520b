"""The connector for vLLM 0.32. Only connector.py imports vLLM; the other modules do not need it."""

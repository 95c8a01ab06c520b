"""The connector for vLLM 0.32. Only connector.py imports vLLM; nothing else here needs it."""

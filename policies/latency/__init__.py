"""Predicts the latencies of requests at an endpoint (TTFT and TPOT) from its engine model."""

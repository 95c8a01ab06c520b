"""Predicts TTFT and TPOT of requests from the engine model of an endpoint."""

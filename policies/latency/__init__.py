"""Predictions of TTFT and TPOT from the engine model of an endpoint."""

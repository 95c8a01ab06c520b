"""Predictions of TTFT and TPOT from the model of an engine."""

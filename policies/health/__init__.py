"""Health of endpoints: failures, slow start, speed outliers, stalls and the retry budget."""

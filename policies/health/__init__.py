"""Whether an endpoint may be used: failures, slow start, speed outliers, and the retry budget."""

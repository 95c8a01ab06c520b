"""The records of a request: metrics, access log, trace spans, and the explanation of its pick."""

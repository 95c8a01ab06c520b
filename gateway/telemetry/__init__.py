"""What a request leaves behind: metrics, the access log, spans, and the explanation of its pick."""

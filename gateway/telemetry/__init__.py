"""What is recorded of each request: metrics, access log, trace spans, reasons of its routing."""

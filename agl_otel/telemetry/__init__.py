"""Report on our own processes: metrics for Prometheus and OTLP, and spans by the parts of the hook."""

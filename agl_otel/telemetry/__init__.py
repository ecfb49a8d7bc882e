"""Telemetry of the package's own processes: metrics for Prometheus and OTLP, and spans through the hook's parts."""

"""Serve REST over the store, the dashboard, Jaeger's APIs and metrics on one port."""

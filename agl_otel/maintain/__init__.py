"""The maintenance of a stack's stores, as a service: `python -m agl_otel.maintain`. `agl-otel maintain` runs the same."""

"""Receive OTLP, identify each span, log it durably, write it to ClickHouse.

`identify` (whose span is this) and `guard` (which SQL may run) are pure; `wal` and `commit` are the spine: OTLP OK means that the
request is in the log and fsynced. `python -m agl_otel.collector` runs the service.
"""

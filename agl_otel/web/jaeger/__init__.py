"""Jaeger's APIs over the stored traces: remote storage v2 on gRPC, for a Jaeger of one's own, and the HTTP query API of its pages."""

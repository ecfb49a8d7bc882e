"""Jaeger's APIs over the stored traces: remote storage v2 on gRPC, for the user's own Jaeger, and the HTTP query API of Jaeger's UI."""

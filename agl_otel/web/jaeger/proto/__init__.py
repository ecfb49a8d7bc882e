"""Jaeger's remote storage API v2 as far as it is served here: storage.proto and the code generated from it (`make proto`)."""

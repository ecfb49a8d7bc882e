"""Store and read observations in ClickHouse: schema, engines, reader, and the verdict on an attempt.

The collector writes through the small interface `engine`; everything else reads through `reader.TraceReader`, over HTTP.
"""

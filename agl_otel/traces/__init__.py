"""Keep and read what was observed in ClickHouse: schema, engines, reader, and the verdict on an attempt.

`engine` is the small interface that the collector writes through; everyone else reads through `reader.TraceReader`, over HTTP.
"""

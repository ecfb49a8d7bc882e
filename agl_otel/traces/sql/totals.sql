-- How much is stored: rows, so a span that was sent twice may count twice until ClickHouse has merged.
SELECT count() AS Spans FROM otel.otel_traces

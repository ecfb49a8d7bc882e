-- What services_mv would have written for one batch.
INSERT INTO otel.services (ServiceName, SpanName, SpanKind, FirstTime, LastTime)
SELECT ServiceName, SpanName, SpanKind, min(Timestamp) AS FirstTime, max(Timestamp) AS LastTime
FROM otel.otel_traces WHERE BatchId = {batch:UInt64} GROUP BY ServiceName, SpanName, SpanKind

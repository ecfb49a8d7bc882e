-- What is stored under these span ids of a training run's trace: the digest of the latest that was told.
SELECT SpanId, argMax(SpanAttributes[{digest:String}], (ReceivedAt, BatchId, BatchPos)) AS Digest
FROM otel.otel_traces
WHERE TraceId = {trace:String} AND SpanId IN {spans:Array(String)} AND RolloutId = '' AND NOT mapContains(SpanAttributes, {invalid:String})
GROUP BY SpanId

-- What otel_traces_trace_id_ts_mv would have written for one batch.
INSERT INTO otel.otel_traces_trace_id_ts (TraceId, Start, End, ReceivedDay, RolloutId)
SELECT TraceId, min(Timestamp) AS Start, max(Timestamp) AS End, toDate(ReceivedAt) AS ReceivedDay, RolloutId
FROM otel.otel_traces WHERE TraceId != '' AND BatchId = {batch:UInt64} GROUP BY TraceId, ReceivedDay, RolloutId

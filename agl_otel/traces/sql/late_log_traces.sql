-- Traces with log records that are stored without ids only, beside spans that have ids; parameters as in late_traces.sql.
SELECT TraceId
FROM otel.otel_logs
WHERE TraceId IN (
  SELECT TraceId FROM otel.otel_logs
  WHERE RolloutId = '' AND TraceId > {after:String} AND cityHash64(TraceId) % {shards:UInt32} = {shard:UInt32}
    AND (ReceivedAt >= fromUnixTimestamp64Milli({since:Int64}) OR TraceId IN (
      SELECT TraceId FROM otel.otel_traces
      WHERE {since:Int64} > 0 AND RolloutId != '' AND ReceivedAt >= fromUnixTimestamp64Milli({since:Int64}))))
GROUP BY TraceId
HAVING uniqExact(BatchId, BatchPos, Timestamp, cityHash64(SpanId, SeverityText, EventName, Body, toString(LogAttributes)))
    > uniqExactIf((BatchId, BatchPos, Timestamp, cityHash64(SpanId, SeverityText, EventName, Body, toString(LogAttributes))), RolloutId != '')
  AND TraceId IN (
    SELECT TraceId FROM otel.otel_traces
    WHERE RolloutId != '' AND TraceId IN (SELECT TraceId FROM otel.otel_logs WHERE RolloutId = '' AND TraceId > {after:String}))
ORDER BY TraceId
LIMIT {limit:UInt32}

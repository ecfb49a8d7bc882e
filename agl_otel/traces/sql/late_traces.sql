-- Traces with spans that are stored without ids only, beside spans that have ids: what the late pass looks at, {limit} at a time. Spans of
-- training runs get no ids, whoever else writes into their traces.
-- {since} (milliseconds): traces of which nothing came after it are left out; 0: all. Of {shards} parts of all traces, the one with number {shard}.
SELECT TraceId
FROM otel.otel_traces
WHERE TraceId IN (
  SELECT TraceId FROM otel.otel_traces
  WHERE RolloutId = '' AND TraceId > {after:String} AND cityHash64(TraceId) % {shards:UInt32} = {shard:UInt32}
    AND (ReceivedAt >= fromUnixTimestamp64Milli({since:Int64}) OR TraceId IN (
      SELECT TraceId FROM otel.otel_traces
      WHERE {since:Int64} > 0 AND RolloutId != '' AND ReceivedAt >= fromUnixTimestamp64Milli({since:Int64}))))
GROUP BY TraceId
HAVING countIf(RolloutId != '') > 0 AND uniqExactIf(SpanId, NOT startsWith(SpanName, {train:String})) > uniqExactIf(SpanId, RolloutId != '')
ORDER BY TraceId
LIMIT {limit:UInt32}

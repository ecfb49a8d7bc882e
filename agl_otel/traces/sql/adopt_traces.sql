-- Whole traces that nobody identified and that went quiet: nothing came after {quiet} (milliseconds), and something since {since}.
-- Our own training runs and their steps are nobody's rollouts.
-- A trace that was adopted before is one of them while spans of it are stored without ids only.
SELECT TraceId
FROM otel.otel_traces
WHERE TraceId IN (
  SELECT TraceId FROM otel.otel_traces
  WHERE RolloutId = '' AND TraceId > {after:String} AND cityHash64(TraceId) % {shards:UInt32} = {shard:UInt32}
    AND ReceivedAt >= fromUnixTimestamp64Milli({since:Int64}))
GROUP BY TraceId
HAVING max(ReceivedAt) <= fromUnixTimestamp64Milli({quiet:Int64})
  AND countIf(RolloutId NOT IN ('', concat({adopted:String}, TraceId)) AND NOT startsWith(RolloutId, {conversation:String})) = 0
  AND countIf(mapContains(SpanAttributes, {invalid:String})) = 0
  AND countIf(startsWith(SpanName, {train:String})) = 0
  AND uniqExact(SpanId) > uniqExactIf(SpanId, RolloutId != '')
ORDER BY TraceId
LIMIT {limit:UInt32}

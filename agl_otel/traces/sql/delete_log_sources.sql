-- Log records that are stored without ids beside their copies with the ids of these rollouts, {limit} at a time: (BatchId, BatchPos, hash).
SELECT DISTINCT BatchId, BatchPos, cityHash64(TraceId, SpanId, Timestamp, SeverityText, EventName, Body, toString(LogAttributes)) AS Hash
FROM otel.otel_logs
WHERE RolloutId = '' AND TraceId IN (SELECT TraceId FROM otel.otel_logs WHERE RolloutId IN {rollouts:Array(String)})
  AND (BatchId, BatchPos, Hash) IN (
    SELECT BatchId, BatchPos, cityHash64(TraceId, SpanId, Timestamp, SeverityText, EventName, Body, toString(LogAttributes))
    FROM otel.otel_logs
    WHERE RolloutId IN {rollouts:Array(String)})
LIMIT {limit:UInt32}

-- Spans that are stored without ids beside their copies with the ids of these rollouts, {limit} at a time.
SELECT DISTINCT TraceId, SpanId
FROM otel.otel_traces
WHERE RolloutId = '' AND TraceId IN (SELECT TraceId FROM otel.otel_traces WHERE RolloutId IN {rollouts:Array(String)})
  AND (TraceId, SpanId) IN (SELECT TraceId, SpanId FROM otel.otel_traces WHERE RolloutId IN {rollouts:Array(String)})
LIMIT {limit:UInt32}

-- What a user writes to read whole rollouts from that table: every span once, with its attributes.
SELECT ResourceAttributes['agentlightning.rollout_id'] AS RolloutId, ResourceAttributes['agentlightning.attempt_id'] AS AttemptId,
  TraceId, SpanId, ParentSpanId, SpanName, Timestamp, SpanAttributes
FROM otel.stock_traces
WHERE ResourceAttributes['agentlightning.rollout_id'] IN {rollouts:Array(String)}
LIMIT 1 BY TraceId, SpanId

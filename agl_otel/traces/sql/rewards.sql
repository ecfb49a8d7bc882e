-- Spans that carry rewards, one row for each identity (the lowest sequence counts).
SELECT RolloutId, AttemptId, SequenceId, SpanId, mapFilter((key, value) -> startsWith(key, {prefix:String}), SpanAttributes) AS Rewards
FROM (
  SELECT RolloutId, AttemptId, TraceId, SpanId, SequenceId, SpanAttributes
  FROM otel.otel_traces
  WHERE RolloutId IN {rollouts:Array(String)} AND mapExists((key, value) -> startsWith(key, {prefix:String}), SpanAttributes)
  ORDER BY RolloutId, AttemptId, TraceId, SpanId, SequenceId
  LIMIT 1 BY RolloutId, AttemptId, TraceId, SpanId
)
ORDER BY RolloutId, AttemptId, SequenceId, SpanId

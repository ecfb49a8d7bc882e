-- The root span of each attempt of some rollouts: the attempt's own, else the earliest without a parent, else the earliest.
SELECT RolloutId, AttemptId, Root.1 AS TraceId, Root.2 AS SpanId
FROM (
  SELECT RolloutId, AttemptId, argMin((TraceId, SpanId), (SpanName != {attempt:String}, ParentSpanId != '', Timestamp, SpanId)) AS Root
  FROM otel.otel_traces
  PREWHERE RolloutId IN {rollouts:Array(String)}
  GROUP BY RolloutId, AttemptId
)
ORDER BY RolloutId, AttemptId

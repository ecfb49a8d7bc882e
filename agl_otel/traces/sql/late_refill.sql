-- What rollout_summary_mv would have written for copied spans: a view can fail after its source was written. Parameters as in late_traces.sql.
INSERT INTO otel.rollout_summary_states (RolloutId, AttemptId, Spans, Errors, Tokens, FirstTime, LastTime)
SELECT RolloutId, AttemptId,
  uniqState(TraceId, SpanId) AS Spans,
  uniqStateIf(TraceId, SpanId, StatusCode = 'Error') AS Errors,
  groupUniqArrayStateIf(tuple(concat(TraceId, SpanId), toUInt32(length(PromptTokenIds)), toUInt32(length(ResponseTokenIds))), notEmpty(ResponseTokenIds)) AS Tokens,
  min(Timestamp) AS FirstTime,
  max(Timestamp + toIntervalNanosecond(Duration)) AS LastTime
FROM otel.otel_traces
WHERE RolloutId != '' AND (TraceId, SpanId) IN (
  SELECT TraceId, SpanId FROM otel.otel_traces
  WHERE RolloutId = '' AND cityHash64(TraceId) % {shards:UInt32} = {shard:UInt32})
GROUP BY RolloutId, AttemptId

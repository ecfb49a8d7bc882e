-- What rollout_summary_mv would have written for one batch.
INSERT INTO otel.rollout_summary_states (RolloutId, AttemptId, Spans, Errors, Tokens, FirstTime, LastTime)
SELECT RolloutId, AttemptId,
  uniqState(TraceId, SpanId) AS Spans,
  uniqStateIf(TraceId, SpanId, StatusCode = 'Error') AS Errors,
  groupUniqArrayStateIf(tuple(concat(TraceId, SpanId), toUInt32(length(PromptTokenIds)), toUInt32(length(ResponseTokenIds))), notEmpty(ResponseTokenIds)) AS Tokens,
  min(Timestamp) AS FirstTime,
  max(Timestamp + toIntervalNanosecond(Duration)) AS LastTime
FROM otel.otel_traces WHERE RolloutId != '' AND BatchId = {batch:UInt64} GROUP BY RolloutId, AttemptId

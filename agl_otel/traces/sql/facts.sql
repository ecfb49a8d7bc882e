-- What is stored of each (attempt, process marker): spans and calls, each identity once. An unmarked span has the marker ''.
SELECT RolloutId, AttemptId, SpanAttributes[{process:String}] AS Marker,
  uniqExactIf((TraceId, SpanId), SpanName != {seal:String} AND SpanName != {attempt:String}) AS Spans,
  uniqExactIf((TraceId, SpanId), SpanName = {annotation:String}) AS Annotations,
  uniqExactIf(toUInt64OrZero(SpanAttributes[{call:String}]), mapContains(SpanAttributes, {call:String})) AS Calls,
  maxIf(toUInt64OrZero(SpanAttributes[{call:String}]), mapContains(SpanAttributes, {call:String})) AS LastCall,
  countIf(SpanName = {seal:String}) AS Seals,
  maxIf(toUInt64OrZero(SpanAttributes[{seal_spans:String}]), SpanName = {seal:String}) AS SealSpans,
  maxIf(toUInt64OrZero(SpanAttributes[{seal_dropped:String}]), SpanName = {seal:String}) AS Dropped,
  countIf(SpanName = {attempt:String} AND SpanAttributes[{hooked:String}] = 'true') AS Hooked,
  max(SequenceId) AS HighestSequence,
  groupBitXor(Identity) AS Digest
FROM (
  SELECT RolloutId, AttemptId, TraceId, SpanId, SpanName, SpanAttributes, SequenceId, sipHash64(RolloutId, AttemptId, TraceId, SpanId) AS Identity
  FROM otel.otel_traces
  WHERE RolloutId IN {rollouts:Array(String)}
  ORDER BY RolloutId, AttemptId, TraceId, SpanId, SequenceId
  LIMIT 1 BY RolloutId, AttemptId, TraceId, SpanId
)
GROUP BY RolloutId, AttemptId, Marker

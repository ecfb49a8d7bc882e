-- What is stored of each (attempt, process marker): spans and calls, each identity once. An unmarked span has the marker ''.
SELECT RolloutId, AttemptId, Marker,
  countIf(SpanName NOT IN ({seal:String}, {attempt:String})) AS Spans,
  countIf(SpanName = {annotation:String}) AS Annotations,
  uniqExactIf(Call, IsCall) AS Calls,
  maxIf(Call, IsCall) AS LastCall,
  countIf(SpanName = {seal:String}) AS Seals,
  max(Sealed) AS SealSpans,
  max(GivenUp) AS Dropped,
  countIf(SpanName = {attempt:String} AND HookedText = 'true') AS Hooked,
  max(SequenceId) AS HighestSequence,
  groupBitXor(sipHash64(RolloutId, AttemptId, TraceId, SpanId)) AS Digest
FROM (
  SELECT RolloutId, AttemptId, TraceId, SpanId, SpanName, SequenceId, SpanAttributes[{process:String}] AS Marker,
    mapContains(SpanAttributes, {call:String}) AS IsCall, toUInt64OrZero(SpanAttributes[{call:String}]) AS Call,
    if(SpanName = {seal:String}, toUInt64OrZero(SpanAttributes[{seal_spans:String}]), 0) AS Sealed,
    if(SpanName = {seal:String}, toUInt64OrZero(SpanAttributes[{seal_dropped:String}]), 0) AS GivenUp,
    SpanAttributes[{hooked:String}] AS HookedText
  FROM otel.otel_traces
  WHERE RolloutId IN {rollouts:Array(String)}
  ORDER BY RolloutId, AttemptId, TraceId, SpanId, SequenceId
  LIMIT 1 BY RolloutId, AttemptId, TraceId, SpanId
)
GROUP BY RolloutId, AttemptId, Marker

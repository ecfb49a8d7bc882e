-- Spans of some traces that are stored without ids only, with what is known of their trace and of their parent: columns of late.Pending.
-- Spans of training runs get no ids.
WITH known AS (
  SELECT TraceId, SpanId, RolloutId, AttemptId,
    (SpanName = {attempt:String} AND ParentSpanId = '') OR RolloutId = concat({adopted:String}, TraceId)
      OR startsWith(RolloutId, {conversation:String}) AS Opens
  FROM otel.otel_traces
  WHERE RolloutId != '' AND TraceId IN {traces:Array(String)}
  ORDER BY TraceId, SpanId, SequenceId, RolloutId, AttemptId
  LIMIT 1 BY TraceId, SpanId
)
SELECT p.TraceId, p.SpanId, p.ParentSpanId, p.Received, p.BatchId, p.BatchPos, p.Sequence, p.Invalid,
  if(length(o.Openers) = 1, o.Openers[1].1, ''), if(length(o.Openers) = 1, o.Openers[1].2, ''), k.RolloutId, k.AttemptId
FROM (
  SELECT TraceId, SpanId, ParentSpanId, toUnixTimestamp64Milli(ReceivedAt) AS Received, BatchId, BatchPos,
    arrayMap(given -> if(given.2 IN ('', 'int'), given.1, ''), [
      (SpanAttributes[{sequence:String}], AttrTypes[{sequence:String}]),
      (ResourceAttributes[{sequence:String}], AttrTypes[concat('resource:', {sequence:String})])]) AS Sequence,
    mapContains(SpanAttributes, {invalid:String}) AS Invalid
  FROM otel.otel_traces
  WHERE RolloutId = '' AND TraceId IN {traces:Array(String)} AND NOT startsWith(SpanName, {train:String}) AND (TraceId, SpanId) > ({after_trace:String}, {after_span:String})
    AND (TraceId, SpanId) NOT IN (SELECT TraceId, SpanId FROM known)
  ORDER BY TraceId, SpanId, Invalid, ReceivedAt, BatchId, BatchPos
  LIMIT 1 BY TraceId, SpanId
  LIMIT {limit:UInt32}
) AS p
LEFT JOIN known AS k ON p.TraceId = k.TraceId AND p.ParentSpanId = k.SpanId
LEFT JOIN (
  SELECT TraceId, groupUniqArray(2)((RolloutId, AttemptId)) AS Openers FROM known WHERE Opens GROUP BY TraceId
) AS o ON p.TraceId = o.TraceId
ORDER BY p.TraceId, p.SpanId

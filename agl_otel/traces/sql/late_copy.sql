-- Copy spans that are stored without ids, with ids; what has ids by now, and what was refused, is left out. A copy keeps BatchId, BatchPos and ReceivedAt.
INSERT INTO otel.otel_traces
SELECT source.* REPLACE (given.ids.3 AS RolloutId, given.ids.4 AS AttemptId, given.ids.5 AS SequenceId)
FROM (
  SELECT * FROM otel.otel_traces
  WHERE RolloutId = '' AND TraceId IN arrayDistinct({traces:Array(String)}) AND (TraceId, SpanId) IN arrayZip({traces:Array(String)}, {spans:Array(String)})
    AND NOT mapContains(SpanAttributes, {invalid:String})
    AND (TraceId, SpanId) NOT IN (SELECT TraceId, SpanId FROM otel.otel_traces WHERE RolloutId != '' AND TraceId IN arrayDistinct({traces:Array(String)}))
  ORDER BY TraceId, SpanId, ReceivedAt, BatchId, BatchPos
  LIMIT 1 BY TraceId, SpanId
) AS source
INNER JOIN (
  SELECT arrayJoin(arrayZip({traces:Array(String)}, {spans:Array(String)}, {rollouts:Array(String)}, {attempts:Array(String)}, {sequences:Array(UInt64)})) AS ids
) AS given ON source.TraceId = given.ids.1 AND source.SpanId = given.ids.2

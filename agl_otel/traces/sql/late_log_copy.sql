-- Copy log records of some traces that are stored without ids, with those of the attempt that opened the trace, else of their own span;
-- evaluations of no span with those of the trace's only attempt.
INSERT INTO otel.otel_logs
WITH known AS (
  SELECT TraceId, SpanId, RolloutId, AttemptId,
    (SpanName = {attempt:String} AND ParentSpanId = '') OR RolloutId = concat({adopted:String}, TraceId)
      OR startsWith(RolloutId, {conversation:String}) AS Opens
  FROM otel.otel_traces
  WHERE RolloutId != '' AND TraceId IN {traces:Array(String)}
  ORDER BY TraceId, SpanId, SequenceId, RolloutId, AttemptId
  LIMIT 1 BY TraceId, SpanId
)
SELECT source.* REPLACE (found.ids.1 AS RolloutId, found.ids.2 AS AttemptId)
FROM (
  SELECT *
  FROM otel.otel_logs
  WHERE RolloutId = '' AND TraceId IN {traces:Array(String)} AND NOT mapContains(LogAttributes, {invalid:String})
    AND (BatchId, BatchPos, Timestamp, cityHash64(SpanId, SeverityText, EventName, Body, toString(LogAttributes))) NOT IN (
      SELECT BatchId, BatchPos, Timestamp, cityHash64(SpanId, SeverityText, EventName, Body, toString(LogAttributes))
      FROM otel.otel_logs
      WHERE RolloutId != '' AND TraceId IN {traces:Array(String)})
) AS source
INNER JOIN (
  SELECT own.TraceId AS TraceId, own.SpanId AS SpanId,
    multiIf(length(openers.ids) = 1, openers.ids[1], own.SpanId = '' AND length(openers.all) = 1, openers.all[1],
      (k.RolloutId, k.AttemptId)) AS ids,
    own.SpanId = '' AND length(openers.ids) != 1 AS IsOnly
  FROM (
    SELECT DISTINCT TraceId, SpanId FROM otel.otel_logs WHERE RolloutId = '' AND TraceId IN {traces:Array(String)}
  ) AS own
  LEFT JOIN known AS k ON own.TraceId = k.TraceId AND own.SpanId = k.SpanId
  LEFT JOIN (
    SELECT TraceId, groupUniqArrayIf(2)((RolloutId, AttemptId), Opens) AS ids, groupUniqArray(2)((RolloutId, AttemptId)) AS all
    FROM known GROUP BY TraceId
  ) AS openers ON own.TraceId = openers.TraceId
) AS found ON source.TraceId = found.TraceId AND source.SpanId = found.SpanId
WHERE found.ids.1 != '' AND (NOT found.IsOnly OR notEmpty(source.Rewards))

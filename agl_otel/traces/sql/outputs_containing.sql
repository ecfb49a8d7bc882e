-- Of some attempts those whose last model call replied with a text in it.
SELECT DISTINCT RolloutId
FROM (
  SELECT RolloutId, argMax(Said, (Timestamp, SequenceId)) AS Reply
  FROM (
    SELECT RolloutId, Timestamp, SequenceId, SpanAttributes[{output:String}] AS Said
    FROM otel.otel_traces
    PREWHERE RolloutId IN {rollouts:Array(String)} AND AttemptId IN {attempts:Array(String)}
    WHERE Said != ''
  )
  GROUP BY RolloutId
)
WHERE position(Reply, {text:String}) > 0 OR position(Reply, {escaped:String}) > 0

-- What the last model call of each of some rollouts replied, as its span has it, up to a bound.
SELECT RolloutId, AttemptId, argMax(Said, (Timestamp, SequenceId)) AS Reply
FROM (
  SELECT RolloutId, AttemptId, Timestamp, SequenceId, left(SpanAttributes[{output:String}], {limit:UInt32}) AS Said
  FROM otel.otel_traces
  PREWHERE RolloutId IN {rollouts:Array(String)}
  WHERE Said != ''
)
GROUP BY RolloutId, AttemptId

-- The stages of a training run's steps, each as it was told last, in the order of their ends.
-- What a collector refused is stored without ids, too, and is no stage.
SELECT toUnixTimestamp64Nano(Timestamp) AS StartNano, Duration, SpanAttributes, AttrTypes
FROM (
  SELECT * FROM otel.otel_traces
  WHERE TraceId = {trace:String} AND RolloutId = '' AND startsWith(SpanName, {stage:String}) AND NOT mapContains(SpanAttributes, {invalid:String})
  ORDER BY SpanId, ReceivedAt DESC, BatchId DESC, BatchPos DESC
  LIMIT 1 BY SpanId
)
ORDER BY StartNano + Duration

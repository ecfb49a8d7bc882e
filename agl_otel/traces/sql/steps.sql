-- The spans of a training run (a trace), one row for each (the latest that was told counts), in order; with a {version} those of its steps.
-- What a collector refused is stored without ids, too, and is no step.
SELECT SpanId, SpanName, toUnixTimestamp64Nano(Timestamp) AS StartNano, Duration, SpanAttributes, AttrTypes,
  arrayMap(a -> (a[{rollout_id:String}], a[{attempt_id:String}]), Links.Attributes) AS Attempts
FROM (
  SELECT * FROM otel.otel_traces
  WHERE TraceId = {trace:String} AND RolloutId = '' AND SpanName IN ({step:String}, {evidence:String})
    AND NOT mapContains(SpanAttributes, {invalid:String})
  ORDER BY SpanId, ReceivedAt DESC, BatchId DESC, BatchPos DESC
  LIMIT 1 BY SpanId
)
WHERE {version:String} = '' OR SpanAttributes[{after:String}] = {version:String} AND SpanAttributes[{before:String}] != {version:String}
ORDER BY Timestamp, toInt64OrZero(SpanAttributes[{number:String}]), SpanName != {step:String}, toInt64OrZero(SpanAttributes[{place:String}])

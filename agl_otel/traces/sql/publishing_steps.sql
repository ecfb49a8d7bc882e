-- The steps of training runs, of whatever run, that left another version of a set of resources than they began with, the latest first.
SELECT Run, Algorithm, Step, Before, After, Verdict
FROM (
  SELECT SpanAttributes[{run:String}] AS Run, SpanAttributes[{algorithm:String}] AS Algorithm,
    toInt64OrZero(SpanAttributes[{number:String}]) AS Step, SpanAttributes[{before:String}] AS Before, SpanAttributes[{after:String}] AS After,
    SpanAttributes[{verdict:String}] AS Verdict, Timestamp
  FROM otel.otel_traces
  WHERE RolloutId = '' AND SpanName = {step:String} AND SpanAttributes[{resources:String}] = {set:String}
    AND NOT mapContains(SpanAttributes, {invalid:String})
  ORDER BY TraceId, SpanId, ReceivedAt DESC, BatchId DESC, BatchPos DESC
  LIMIT 1 BY TraceId, SpanId
)
WHERE Before != After
ORDER BY Timestamp DESC, Step DESC
LIMIT {limit:UInt32}

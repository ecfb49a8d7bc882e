-- Training runs, the latest first. What a collector refused is stored without ids, too, and is no step.
SELECT Run, any(Algorithm) AS Algorithm, uniqExact(Step) AS Steps, max(Step) AS LastStep, argMax(Version, Step) AS LastVersion,
  toUnixTimestamp64Nano(min(Timestamp)) AS StartNano, max(toUnixTimestamp64Nano(Timestamp) + Duration) AS EndNano
FROM (
  SELECT SpanAttributes[{run:String}] AS Run, SpanAttributes[{algorithm:String}] AS Algorithm,
    toInt64OrZero(SpanAttributes[{number:String}]) AS Step, SpanAttributes[{after:String}] AS Version, Timestamp, Duration
  FROM otel.otel_traces
  WHERE RolloutId = '' AND SpanName = {step:String} AND NOT mapContains(SpanAttributes, {invalid:String})
)
GROUP BY Run
ORDER BY EndNano DESC, Run
LIMIT {limit:UInt32}

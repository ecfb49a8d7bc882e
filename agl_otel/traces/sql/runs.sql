-- Training runs, the latest first, or one of them. What a collector refused is stored without ids, too, and is no step.
SELECT Run, any(Algorithm) AS Algorithm, uniqExactIf(Step, IsStep) AS Steps, maxIf(Step, IsStep) AS LastStep, argMaxIf(Version, Step, IsStep) AS LastVersion,
  uniqExactIf(Step, IsStep AND Verdict = 'promoted') AS Promoted, argMaxIf(Outcome, Told, NOT IsStep) AS Outcome,
  toUnixTimestamp64Nano(min(Timestamp)) AS StartNano, max(toUnixTimestamp64Nano(Timestamp) + Duration) AS EndNano
FROM (
  SELECT SpanAttributes[{run:String}] AS Run, SpanAttributes[{algorithm:String}] AS Algorithm, SpanName = {step:String} AS IsStep,
    toInt64OrZero(SpanAttributes[{number:String}]) AS Step, SpanAttributes[{after:String}] AS Version, SpanAttributes[{outcome:String}] AS Outcome,
    SpanAttributes[{verdict:String}] AS Verdict,
    (ReceivedAt, BatchId, BatchPos) AS Told, Timestamp, Duration
  FROM otel.otel_traces
  WHERE RolloutId = '' AND SpanName IN ({step:String}, {whole:String}) AND ({trace:String} = '' OR TraceId = {trace:String})
    AND NOT mapContains(SpanAttributes, {invalid:String})
)
GROUP BY Run
ORDER BY EndNano DESC, Run
LIMIT {limit:UInt32}

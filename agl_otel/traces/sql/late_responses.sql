-- Evaluations of some responses, of no trace and stored without ids only: the response and the time of each, the ids of the latest model
-- call with that response from {before} to {behind} nanoseconds around it, and how many attempts have such calls. {settled} as in late_evaluations.sql.
SELECT given.Response, given.Time, argMax(call.Ids, (call.Time, call.Ids)) AS Latest, uniqExactIf(call.Ids, call.Ids.1 != '')
FROM (
  SELECT DISTINCT Rewards[{reward_response:String}] AS Response, toUnixTimestamp64Nano(Timestamp) AS Time
  FROM otel.otel_logs
  WHERE RolloutId = '' AND TraceId = '' AND Response IN {responses:Array(String)} AND NOT mapContains(LogAttributes, {invalid:String})
    AND ReceivedAt <= fromUnixTimestamp64Milli({settled:Int64})
    AND (BatchId, BatchPos, Timestamp, cityHash64(SpanId, SeverityText, EventName, Body, toString(LogAttributes))) NOT IN (
      SELECT BatchId, BatchPos, Timestamp, cityHash64(SpanId, SeverityText, EventName, Body, toString(LogAttributes))
      FROM otel.otel_logs
      WHERE RolloutId != '' AND TraceId = '' AND Rewards[{reward_response:String}] IN {responses:Array(String)})
) AS given
INNER JOIN (
  SELECT Facts[{response:String}] AS Response, toUnixTimestamp64Nano(min(Timestamp)) AS Time, max((RolloutId, AttemptId)) AS Ids
  FROM otel.otel_traces
  WHERE Facts[{response:String}] IN {responses:Array(String)} AND NOT mapContains(SpanAttributes, {invalid:String})
  GROUP BY Response, TraceId, SpanId
) AS call ON given.Response = call.Response
WHERE call.Time >= given.Time - {before:Int64} AND call.Time <= given.Time + {behind:Int64}
GROUP BY given.Response, given.Time

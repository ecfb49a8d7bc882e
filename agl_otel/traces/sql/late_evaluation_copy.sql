-- Copy evaluations of no trace that are stored without ids only, with the given ids for each response and time.
INSERT INTO otel.otel_logs
SELECT source.* REPLACE (given.ids.3 AS RolloutId, given.ids.4 AS AttemptId)
FROM (
  SELECT * FROM otel.otel_logs
  WHERE RolloutId = '' AND TraceId = '' AND Rewards[{reward_response:String}] IN {responses:Array(String)} AND NOT mapContains(LogAttributes, {invalid:String})
    AND (BatchId, BatchPos, Timestamp, cityHash64(SpanId, SeverityText, EventName, Body, toString(LogAttributes))) NOT IN (
      SELECT BatchId, BatchPos, Timestamp, cityHash64(SpanId, SeverityText, EventName, Body, toString(LogAttributes))
      FROM otel.otel_logs
      WHERE RolloutId != '' AND TraceId = '' AND Rewards[{reward_response:String}] IN {responses:Array(String)})
) AS source
INNER JOIN (
  SELECT arrayJoin(arrayZip({responses:Array(String)}, {times:Array(Int64)}, {rollouts:Array(String)}, {attempts:Array(String)})) AS ids
) AS given ON source.Rewards[{reward_response:String}] = given.ids.1 AND toUnixTimestamp64Nano(source.Timestamp) = given.ids.2

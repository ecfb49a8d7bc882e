-- Copy evaluations of no trace that are stored without ids, with those of the attempts that have the responses which they name.
INSERT INTO otel.otel_logs
SELECT source.* REPLACE (given.ids.2 AS RolloutId, given.ids.3 AS AttemptId)
FROM (
  SELECT * FROM otel.otel_logs
  WHERE RolloutId = '' AND TraceId = '' AND Rewards[{reward_response:String}] IN {responses:Array(String)} AND NOT mapContains(LogAttributes, {invalid:String})
    AND (BatchId, BatchPos, Timestamp, cityHash64(SpanId, SeverityText, EventName, Body, toString(LogAttributes))) NOT IN (
      SELECT BatchId, BatchPos, Timestamp, cityHash64(SpanId, SeverityText, EventName, Body, toString(LogAttributes))
      FROM otel.otel_logs
      WHERE RolloutId IN {rollouts:Array(String)} AND TraceId = '')
) AS source
INNER JOIN (
  SELECT arrayJoin(arrayZip({responses:Array(String)}, {rollouts:Array(String)}, {attempts:Array(String)})) AS ids
) AS given ON source.Rewards[{reward_response:String}] = given.ids.1

-- Evaluations of no trace that are stored without ids: the model calls' responses that they name. {since}, {after}
-- and {limit} as in late_traces.sql.
SELECT DISTINCT Rewards[{reward_response:String}] AS Response
FROM otel.otel_logs
WHERE RolloutId = '' AND TraceId = '' AND Response > {after:String} AND ReceivedAt >= fromUnixTimestamp64Milli({since:Int64})
  AND NOT mapContains(LogAttributes, {invalid:String})
ORDER BY Response
LIMIT {limit:UInt32}

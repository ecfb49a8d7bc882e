-- Evaluations of no trace that are stored without ids: the model calls' responses that they name. {since}, {after}
-- and {limit} as in late_traces.sql; also older ones of the responses in {traces}, and of calls that came since {since}. Those that came after {settled} (milliseconds) wait.
SELECT DISTINCT Rewards[{reward_response:String}] AS Response
FROM otel.otel_logs
WHERE RolloutId = '' AND TraceId = '' AND Response > {after:String} AND ReceivedAt <= fromUnixTimestamp64Milli({settled:Int64})
  AND (ReceivedAt >= fromUnixTimestamp64Milli({since:Int64}) OR Response IN (
    SELECT Facts[{response:String}] FROM otel.otel_traces
    WHERE TraceId IN {traces:Array(String)} OR ({since:Int64} > 0 AND ReceivedAt >= fromUnixTimestamp64Milli({since:Int64}))))
  AND NOT mapContains(LogAttributes, {invalid:String})
ORDER BY Response
LIMIT {limit:UInt32}

-- Traces of which every stored span is of these rollouts, {limit} at a time, in order; {after} is the last one that was read.
SELECT TraceId
FROM otel.otel_traces
WHERE TraceId IN (SELECT TraceId FROM otel.otel_traces WHERE RolloutId IN {rollouts:Array(String)}) AND TraceId > {after:String}
GROUP BY TraceId
HAVING countIf(RolloutId NOT IN {rollouts:Array(String)}) = 0
ORDER BY TraceId
LIMIT {limit:UInt32}

-- How many spans of their own the attempts of some rollouts have. A span that was sent twice counts once.
SELECT RolloutId, AttemptId, uniqExact(TraceId, SpanId) AS Spans
FROM otel.otel_traces
PREWHERE RolloutId IN {rollouts:Array(String)}
WHERE SpanName NOT IN ({seal:String}, {attempt:String}, {annotation:String})
GROUP BY RolloutId, AttemptId

-- The ids of feedback on some rollouts, of those ids that are one of these up to the first dot.
SELECT DISTINCT LogAttributes[{feedback_id:String}] AS Id
FROM otel.otel_logs
PREWHERE RolloutId IN {rollouts:Array(String)}
WHERE splitByChar('.', Id)[1] IN {ids:Array(String)}

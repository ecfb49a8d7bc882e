-- Which of these ids of feedback are stored for some rollouts.
SELECT DISTINCT LogAttributes[{feedback_id:String}] AS Id
FROM otel.otel_logs
PREWHERE RolloutId IN {rollouts:Array(String)}
WHERE Id IN {ids:Array(String)}

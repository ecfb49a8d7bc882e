-- Whether feedback is stored for an attempt, or under no attempt yet. Every evaluation has something in Rewards, and no other record.
SELECT RolloutId, AttemptId
FROM otel.otel_logs
PREWHERE RolloutId IN ('', {rollout_id:String}) AND notEmpty(Rewards)
WHERE AttemptId IN ('', {attempt_id:String}) AND LogAttributes[{feedback_id:String}] = {id:String}
ORDER BY RolloutId DESC
LIMIT 1

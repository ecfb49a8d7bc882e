-- What the agents of one rollout printed, in the order in which it was read, each part once.
SELECT AttemptId, LogAttributes[{stream:String}] AS Stream, Body
FROM otel.otel_logs
WHERE RolloutId = {rollout:String} AND Stream != ''
ORDER BY AttemptId, Timestamp, BatchId, BatchPos
LIMIT 1 BY AttemptId, Timestamp, Stream, Body

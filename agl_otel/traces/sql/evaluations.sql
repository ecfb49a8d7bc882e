-- The evaluations of some rollouts that were sent as log records, in order of time, each once.
SELECT RolloutId, AttemptId, TraceId, SpanId, toUnixTimestamp64Nano(Timestamp) AS Time, SequenceId, Rewards, LogAttributes, AttrTypes,
  sipHash64(RolloutId, AttemptId, TraceId, SpanId, Timestamp, toString(Rewards)) AS Identity
FROM otel.otel_logs
PREWHERE RolloutId IN {rollouts:Array(String)}
WHERE notEmpty(Rewards)
ORDER BY RolloutId, AttemptId, Timestamp, BatchId, BatchPos
LIMIT 1 BY RolloutId, AttemptId, TraceId, SpanId, Timestamp, Rewards

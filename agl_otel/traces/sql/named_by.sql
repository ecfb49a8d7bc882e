-- What an id names besides a rollout of the queue: rollouts of the spans of a trace (an empty one: spans without ids), spans of a
-- rollout, or the rollout that continued a conversation last.
SELECT DISTINCT 'trace' AS Kind, RolloutId FROM otel.otel_traces_trace_id_ts WHERE TraceId = lower({id:String}) LIMIT {limit:UInt32}
UNION ALL
SELECT * FROM (SELECT 'rollout' AS Kind, RolloutId FROM otel.otel_traces WHERE RolloutId = {id:String} LIMIT 1)
UNION ALL
SELECT * FROM (
  SELECT 'conversation' AS Kind, RolloutId FROM otel.otel_traces PREWHERE ConversationId = {id:String} WHERE RolloutId != ''
  ORDER BY Timestamp DESC LIMIT 1)

-- Parents, and the names of agents, in the attempts that name one: whose call was it?
SELECT RolloutId, AttemptId, SpanId, any(ParentSpanId) AS Parent, any(SpanAttributes[{agent:String}]) AS Agent
FROM otel.otel_traces
WHERE (RolloutId, AttemptId) IN (
  SELECT RolloutId, AttemptId FROM otel.otel_traces
  WHERE RolloutId IN {rollouts:Array(String)} AND SpanAttributes[{agent:String}] != '')
GROUP BY RolloutId, AttemptId, SpanId

-- The mean log-prob of the tokens that each of some attempts sampled, the lowest first. A span that was sent twice counts once.
SELECT RolloutId, AttemptId, sum(arraySum(ResponseLogprobs)) / sum(length(ResponseLogprobs)) AS Mean, sum(length(ResponseLogprobs)) AS Tokens
FROM (
  SELECT RolloutId, AttemptId, arrayFilter(each -> isFinite(each), ResponseLogprobs) AS ResponseLogprobs
  FROM otel.otel_traces
  PREWHERE RolloutId IN {rollouts:Array(String)}
  WHERE notEmpty(ResponseLogprobs)
  LIMIT 1 BY RolloutId, AttemptId, TraceId, SpanId
)
GROUP BY RolloutId, AttemptId
HAVING Tokens > 0
ORDER BY Mean, RolloutId, AttemptId

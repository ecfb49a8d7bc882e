-- One row for each rollout of a large run, of all its attempts: sums count rows, so a span that was sent twice may count twice until
-- ClickHouse has merged. The reward is the last primary one, of those that the runner gave where it gave any. `rollouts` empty: all ids between `first` and `last`.
SELECT RolloutId, count() AS Spans, countIf(StatusCode = 'Error') AS Errors,
  sumIf(length(PromptTokenIds), toInt64OrZero(Facts[{choice:String}]) = 0) AS PromptTokens, sum(length(ResponseTokenIds)) AS ResponseTokens,
  argMaxIf(toFloat64OrNull(Facts[{reward:String}]), (AttemptId, mapContains(Facts, {given:String}), SequenceId), mapContains(Facts, {reward:String})) AS Reward
FROM otel.otel_traces
PREWHERE RolloutId BETWEEN {first:String} AND {last:String} AND (empty({rollouts:Array(String)}) OR RolloutId IN {rollouts:Array(String)})
GROUP BY RolloutId

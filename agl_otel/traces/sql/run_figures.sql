-- One row for each rollout of a large run, of all its attempts. A span that was sent twice counts once. Prompt tokens are those that the
-- server read: of each call the whole prompt, by the server's count (its stored ids may leave out what an earlier call has). The reward is
-- the last primary one of the latest attempt that is not late, of those that the runner gave where it gave any; NULL where that attempt has none, so it is in a
-- tuple, because aggregates leave out bare NULLs. `rollouts` empty: all ids between `first` and `last`.
SELECT RolloutId, count() AS Spans, countIf(StatusCode = 'Error') AS Errors,
  sumIf(greatest(Prompt, toUInt64OrZero(Facts[{input_tokens:String}])), IsFirst) AS PromptTokens,
  sum(if(Response = 0 AND IsFirst, toUInt64OrZero(Facts[{output_tokens:String}]), Response)) AS ResponseTokens,
  argMax(tuple(if(IsReward, toFloat64OrNull(Facts[{reward:String}]), NULL)),
    (AttemptId, IsReward, mapContains(Facts, {given:String}), SequenceId)).1 AS Reward
FROM (
  SELECT RolloutId, AttemptId, SequenceId, StatusCode, Facts, length(PromptTokenIds) AS Prompt, length(ResponseTokenIds) AS Response,
    (SpanName = {llm:String} OR Prompt > 0) AND toInt64OrZero(Facts[{choice:String}]) = 0 AS IsFirst,
    mapContains(Facts, {reward:String}) AND Facts[{late:String}] != 'true' AS IsReward
  FROM otel.otel_traces
  PREWHERE RolloutId BETWEEN {first:String} AND {last:String} AND (empty({rollouts:Array(String)}) OR RolloutId IN {rollouts:Array(String)})
  LIMIT 1 BY RolloutId, AttemptId, TraceId, SpanId
)
GROUP BY RolloutId

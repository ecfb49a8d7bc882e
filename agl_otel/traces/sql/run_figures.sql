-- One row for each rollout of a large run, of all its attempts. A span that was sent twice counts once. Prompt tokens are those that the
-- server read: of each call the whole prompt, by the server's count (its stored ids may leave out what an earlier call has). The reward is
-- that of the latest attempt, in the order of rows.rewards_of: the last that the runner gave, else the later one of the last primary reward
-- and the last evaluation; NULL where that attempt has none, so it is in a tuple, because aggregates leave out bare NULLs, or where it is not
-- usable (types/scores.py). `rollouts` empty: all ids between `first` and `last`.
SELECT RolloutId, countIf(NOT IsRecord) AS Spans, countIf(StatusCode = 'Error') AS Errors,
  sumIf(greatest(Prompt, toUInt64OrZero(Facts[{input_tokens:String}])), IsFirst) AS PromptTokens,
  sum(if(Response = 0 AND IsFirst, toUInt64OrZero(Facts[{output_tokens:String}]), Response)) AS ResponseTokens,
  argMax((if(IsOwn, Value, NULL), Time, Given), (AttemptId, IsOwn, Given, SequenceId)) AS Own,
  argMax((if(IsEvaluation, Value, NULL), Time),
    (AttemptId, IsEvaluation, Time, Rewards[{reward_name:String}], isNaN(ifNull(Value, 0)), ifNull(Value, 0))) AS Evaluation,
  if(isNull(Evaluation.1) OR (isNotNull(Own.1) AND (Own.3 OR Own.2 > Evaluation.2)), Own.1, Evaluation.1) AS Last,
  if(abs(Last) <= {max_reward:Float64}, Last, NULL) AS Reward
FROM (
  SELECT RolloutId, AttemptId, SequenceId, StatusCode, Facts, Rewards, IsRecord, Prompt, Response,
    (SpanName = {llm:String} OR Prompt > 0) AND toInt64OrZero(Facts[{choice:String}]) = 0 AS IsFirst,
    if(Facts[{late:String}] = 'true', NULL, toFloat64OrNull(Rewards[{reward:String}])) AS Value, mapContains(Rewards, {given:String}) AS Given,
    isNotNull(Value) AND mapContains(Rewards, {reward_time:String}) AS IsEvaluation, isNotNull(Value) AND NOT IsEvaluation AS IsOwn,
    if(IsEvaluation, toInt64OrZero(Rewards[{reward_time:String}]), toUnixTimestamp64Nano(Timestamp)) AS Time
  FROM (
    SELECT RolloutId, AttemptId, TraceId, SpanId, SequenceId, Timestamp, SpanName, StatusCode, Facts, Rewards, false AS IsRecord,
      length(PromptTokenIds) AS Prompt, length(ResponseTokenIds) AS Response
    FROM otel.otel_traces
    PREWHERE RolloutId BETWEEN {first:String} AND {last:String} AND (empty({rollouts:Array(String)}) OR RolloutId IN {rollouts:Array(String)})
    LIMIT 1 BY RolloutId, AttemptId, TraceId, SpanId
    UNION ALL
    SELECT RolloutId, AttemptId, TraceId, SpanId, SequenceId, Timestamp, '', '', map(), Rewards, true, 0, 0
    FROM otel.otel_logs
    PREWHERE RolloutId BETWEEN {first:String} AND {last:String} AND (empty({rollouts:Array(String)}) OR RolloutId IN {rollouts:Array(String)})
    WHERE notEmpty(Rewards)
  )
)
GROUP BY RolloutId

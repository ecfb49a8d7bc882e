-- All rows of some rollouts as verdicts, model calls, rewards and agents need them. Of the attributes only `Facts` is read: the map of all of
-- them is most of what is stored. Nothing is sorted, and nothing is left out that is stored twice: with the tokens either takes several times
-- their memory. tokens.once_in_order does both.
-- A call without a number named no rollout when the proxy recorded it: its trace was adopted. A seal span without a count is an announcement: its
-- process has begun to work for the attempt.
SELECT RolloutId, AttemptId, SpanId, ParentSpanId, SequenceId, sipHash64(RolloutId, AttemptId, TraceId, SpanId) AS Identity,
  Facts[{process:String}] AS Process,
  SpanName != {seal:String} AND SpanName != {attempt:String} AS IsSpan,
  IsSpan AND Facts[{late:String}] != 'true' AS IsCounted, IsCounted AND SpanName = {annotation:String} AS IsAnnotation,
  SpanName = {seal:String} AND mapContains(Facts, {seal_spans:String}) AS IsSeal, if(IsSeal, toUnixTimestamp64Nano(Timestamp), 0) AS SealTime,
  if(IsSeal, toUInt64OrZero(Facts[{seal_spans:String}]), 0) AS SealSpans,
  if(IsSeal, toUInt64OrZero(Facts[{seal_dropped:String}]), 0) AS Dropped,
  IsSeal AND Facts[{seal_closing:String}] = 'true' AS IsClosing, Facts[{caller:String}] AS Caller,
  SpanName = {attempt:String} AND Facts[{hooked:String}] = 'true' AS Hooked,
  mapContains(Facts, {call:String}) OR (SpanName = {llm:String} AND notEmpty(ResponseTokenIds)) AS IsCall,
  toInt64OrZero(Facts[{call:String}]) AS Call, toInt64OrZero(Facts[{choice:String}]) AS Choice,
  toInt64OrZero(Facts[{prefix_call:String}]) AS PrefixCall, toInt64OrZero(Facts[{prefix_choice:String}]) AS PrefixChoice,
  Facts[{model_version:String}] AS ModelVersion, Facts[{incomplete:String}] AS Incomplete,
  multiIf(Facts[{agent:String}] != '', Facts[{agent:String}], Facts[{own_agent:String}] != '', Facts[{own_agent:String}],
    startsWith(SpanName, {task:String}) AND Facts[{integration:String}] = 'langgraph', Facts[{node:String}], '') AS Agent,
  toInt64OrZero(Facts[{retry_of:String}]) AS RetryOf,
  position(Facts[{finish:String}], '"length"') > 0 AS IsTruncated,
  ifNull(toFloat64OrNull(Facts[{temperature:String}]), nan) AS Temperature, ifNull(toFloat64OrNull(Facts[{top_p:String}]), nan) AS TopP,
  Facts[{constrained:String}] != '' AS IsConstrained,
  mapFilter((key, value) -> startsWith(key, {prefix:String}), Facts) AS Rewards,
  IsCounted AND notEmpty(Rewards) AS IsReward,
  HasMedia, PromptTokenIds, ResponseTokenIds, ResponseLogprobs
FROM otel.otel_traces
PREWHERE RolloutId IN {rollouts:Array(String)}

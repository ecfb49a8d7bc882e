-- What people look at of some rollouts: the rows of traces.sql without tokens and texts, which are nearly all of it.
SELECT RolloutId, AttemptId, SpanId, ParentSpanId, SequenceId, if(IsRecord, sipHash64(RolloutId, AttemptId, TraceId, Evaluated, Timestamp, toString(Rewards)),
    sipHash64(RolloutId, AttemptId, TraceId, SpanId)) AS Identity, toUnixTimestamp64Nano(Timestamp) AS Time, Evaluated,
  Facts[{process:String}] AS Process,
  NOT IsRecord AND SpanName != {seal:String} AND SpanName != {attempt:String} AS IsSpan,
  IsSpan AND Facts[{late:String}] != 'true' AS IsCounted, IsCounted AND SpanName = {annotation:String} AS IsAnnotation,
  SpanName = {seal:String} AND mapContains(Facts, {seal_spans:String}) AS IsSeal, if(IsSeal, toUnixTimestamp64Nano(Timestamp), 0) AS SealTime,
  if(IsSeal, toUInt64OrZero(Facts[{seal_spans:String}]), 0) AS SealSpans,
  if(IsSeal, toUInt64OrZero(Facts[{seal_dropped:String}]), 0) AS Dropped,
  IsSeal AND Facts[{seal_closing:String}] = 'true' AS IsClosing, Facts[{caller:String}] AS Caller,
  SpanName = {attempt:String} AND Facts[{hooked:String}] = 'true' AS Hooked,
  mapContains(Facts, {call:String}) OR (SpanName = {llm:String} AND Replied > 0) AS IsCall,
  toInt64OrZero(Facts[{call:String}]) AS Call,
  IsCall AND toInt64OrZero(Facts[{choice:String}]) > 0 AS IsFurtherChoice, IsCall AND NOT IsFurtherChoice AS IsFirstChoice,
  ConversationId, Rewards, (IsCounted OR IsRecord) AND notEmpty(Rewards) AS IsReward,
  StatusCode = 'Error' AS IsError, if(IsFurtherChoice, 0, greatest(PromptTokens, if(IsCall, toUInt64OrZero(Facts[{input_tokens:String}]), 0))) AS ReadTokens,
  if(Replied = 0 AND IsFirstChoice, toUInt64OrZero(Facts[{output_tokens:String}]), Replied) AS ResponseTokens
FROM (
  SELECT RolloutId, AttemptId, TraceId, SpanId, ParentSpanId, SpanName, SequenceId, Timestamp, ConversationId, Facts, Rewards, '' AS Evaluated, false AS IsRecord, StatusCode,
    length(PromptTokenIds) AS PromptTokens, length(ResponseTokenIds) AS Replied
  FROM otel.otel_traces
  PREWHERE RolloutId IN {rollouts:Array(String)}
  ORDER BY RolloutId, AttemptId, TraceId, SpanId, SequenceId
  LIMIT 1 BY RolloutId, AttemptId, TraceId, SpanId
  UNION ALL
  SELECT RolloutId, AttemptId, TraceId, '', '', '', SequenceId, Timestamp, '', map(), Rewards, SpanId, true, '', 0, 0
  FROM otel.otel_logs
  PREWHERE RolloutId IN {rollouts:Array(String)}
  WHERE notEmpty(Rewards)
  LIMIT 1 BY RolloutId, AttemptId, TraceId, SpanId, Timestamp, Rewards
)

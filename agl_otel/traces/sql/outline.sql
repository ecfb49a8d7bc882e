-- The spans of one rollout (or one of its attempts) as a picture needs them, in order of time; what was said and tokens stay where they are.
SELECT *, count() OVER () AS Total FROM (
  SELECT AttemptId, SequenceId, TraceId, SpanId, ParentSpanId, SpanName, SpanKind, ServiceName, StatusCode, left(StatusMessage, 500) AS StatusMessage,
    toUnixTimestamp64Nano(Timestamp) AS StartNano, Duration, Facts[{process:String}] AS Process,
    mapContains(Facts, {call:String}) OR (SpanName = {llm:String} AND notEmpty(ResponseTokenIds)) AS IsCall, toInt64OrZero(Facts[{call:String}]) AS Call, toInt64OrZero(Facts[{choice:String}]) AS Choice,
    Facts[{model_version:String}] AS ModelVersion, Facts[{agent:String}] AS Agent, Facts[{incomplete:String}] AS Incomplete, Facts[{sampling:String}] AS Sampling,
    length(PromptTokenIds) AS PromptTokens, length(ResponseTokenIds) AS ResponseTokens,
    Rewards,
    SpanAttributes[{model:String}] AS Model, SpanAttributes[{bridge:String}] AS Bridge, SpanAttributes[{response:String}] AS ResponseId, SpanAttributes[{tool:String}] AS Tool, SpanAttributes[{operation:String}] AS Operation, SpanAttributes[{operation_name:String}] AS OperationName,
    if(startsWith(SpanName, {workflow_span:String}), Facts[{workflow:String}], '') AS Workflow, ConversationId, length(Events.Name) AS EventCount
  FROM otel.otel_traces
  PREWHERE RolloutId IN {rollouts:Array(String)} AND ({attempt_id:String} = '' OR AttemptId = {attempt_id:String})
  ORDER BY AttemptId, TraceId, SpanId, SequenceId
  LIMIT 1 BY AttemptId, TraceId, SpanId
)
ORDER BY AttemptId, StartNano, SequenceId, SpanId LIMIT {limit:UInt64} OFFSET {offset:UInt64}
SETTINGS max_threads = 1

-- All rows of the spans of some rollouts, or of one attempt of theirs, in no order: whoever reads few sorts them faster.
SELECT RolloutId, AttemptId, SequenceId, TraceId, SpanId, ParentSpanId, SpanName, SpanKind, StatusCode, StatusMessage, ServiceName,
  ScopeName, ScopeVersion, TraceState, toUnixTimestamp64Nano(Timestamp) AS StartNano, Duration, SpanAttributes, ResourceAttributes,
  AttrTypes, PromptTokenIds, ResponseTokenIds, ResponseLogprobs, arrayMap(t -> toUnixTimestamp64Nano(t), Events.Timestamp) AS EventNanos,
  Events.Name AS EventNames, Events.Attributes AS EventAttributes, Links.TraceId AS LinkTraceIds, Links.SpanId AS LinkSpanIds,
  Links.TraceState AS LinkTraceStates, Links.Attributes AS LinkAttributes
FROM otel.otel_traces
PREWHERE RolloutId IN {rollouts:Array(String)} AND ({attempt:String} = '' OR AttemptId = {attempt:String})

-- All spans of some traces, one row for each (TraceId, SpanId): the identified one first, else the one without ids, of these the latest
-- (a training step that was done again), and of what was refused only what stands alone. In order of time. Their rollouts are given (trace_rollouts.sql): trace ids are found by bloom filters,
-- which err in some parts, and opening all the columns of a part costs more than reading the rows. One thread: the rows are
-- few, and two take longer.
SELECT RolloutId, AttemptId, SequenceId, TraceId, SpanId, ParentSpanId, SpanName, SpanKind, StatusCode, StatusMessage, ServiceName,
  ScopeName, ScopeVersion, TraceState, toUnixTimestamp64Nano(Timestamp) AS StartNano, Duration, SpanAttributes, ResourceAttributes,
  AttrTypes, PromptTokenIds, ResponseTokenIds, ResponseLogprobs, arrayMap(t -> toUnixTimestamp64Nano(t), Events.Timestamp) AS EventNanos,
  Events.Name AS EventNames, Events.Attributes AS EventAttributes, Links.TraceId AS LinkTraceIds, Links.SpanId AS LinkSpanIds,
  Links.TraceState AS LinkTraceStates, Links.Attributes AS LinkAttributes
FROM (
  SELECT * FROM otel.otel_traces
  PREWHERE RolloutId IN {rollouts:Array(String)}
  WHERE TraceId IN {traces:Array(String)}
  ORDER BY TraceId, SpanId, RolloutId = '', mapContains(SpanAttributes, {invalid:String}), SequenceId, RolloutId, AttemptId, ReceivedAt DESC, BatchId DESC
  LIMIT 1 BY TraceId, SpanId
)
ORDER BY TraceId, Timestamp, SequenceId, SpanId
LIMIT {limit:UInt32}
SETTINGS max_threads = 1

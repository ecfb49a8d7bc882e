-- Model calls with their tokens, one row for each identity (the lowest sequence counts), in the order of CallColumns. The map of
-- attributes, which holds whole texts, is not carried through the sorting.
SELECT RolloutId, AttemptId, SpanAttributes[{process:String}] AS Process, SpanId, ParentSpanId, TraceId, SequenceId,
  toInt64OrZero(SpanAttributes[{call:String}]) AS Call, toInt64OrZero(SpanAttributes[{choice:String}]) AS Choice,
  toInt64OrZero(SpanAttributes[{prefix_call:String}]) AS PrefixCall, toInt64OrZero(SpanAttributes[{prefix_choice:String}]) AS PrefixChoice,
  PromptTokenIds, ResponseTokenIds, ResponseLogprobs, SpanAttributes[{model_version:String}] AS ModelVersion,
  SpanAttributes[{agent:String}] AS Agent, SpanAttributes[{incomplete:String}] AS Incomplete,
  toInt64OrZero(SpanAttributes[{retry_of:String}]) AS RetryOf,
  multiSearchAny(SpanAttributes[{asked:String}], ['"image', '"input_image', '"blob"', '"uri"']) AS HasImages
FROM otel.otel_traces
WHERE RolloutId IN {rollouts:Array(String)} AND mapContains(SpanAttributes, {call:String})
ORDER BY RolloutId, AttemptId, Process, Call, Choice, SequenceId, SpanId
LIMIT 1 BY RolloutId, AttemptId, TraceId, SpanId

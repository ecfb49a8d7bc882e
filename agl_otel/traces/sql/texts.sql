-- What was said in model calls, one row for each identity: read only for rollouts that need it, because it is most of what is stored.
-- The calls are those of traces.sql: also those without a number, of adopted traces.
SELECT RolloutId, AttemptId, SpanId, SpanAttributes[{instructions:String}] AS Instructions, SpanAttributes[{asked:String}] AS Asked,
  SpanAttributes[{answered:String}] AS Answered, SpanAttributes[{tools:String}] AS Tools,
  SpanAttributes[{weight_versions:String}] AS Versions, SpanAttributes[{experts:String}] AS Experts, SpanAttributes[{bridge:String}] AS Bridge,
  toInt64OrZero(SpanAttributes[{messages_call:String}]) AS MessagesCall, toInt64OrZero(SpanAttributes[{messages_before:String}]) AS MessagesBefore,
  toInt64OrZero(SpanAttributes[{tools_call:String}]) AS ToolsCall
FROM otel.otel_traces
WHERE RolloutId IN {rollouts:Array(String)} AND (mapContains(Facts, {call:String}) OR (SpanName = {llm:String} AND notEmpty(ResponseTokenIds)))
LIMIT 1 BY RolloutId, AttemptId, SpanId

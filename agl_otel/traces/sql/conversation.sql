-- The latest span of a conversation: its trace, and the attempt that it is of, if that is known by now.
SELECT TraceId, RolloutId, AttemptId
FROM otel.otel_traces
PREWHERE ConversationId = {conversation:String}
ORDER BY Timestamp DESC, RolloutId != '' DESC, SpanId
LIMIT 1

-- The generative-AI events of some rollouts that were sent as log records, evaluations left out, in order of time, each once.
SELECT TraceId, SpanId, if(EventName != '', EventName, LogAttributes['event.name']) AS Event, Body, LogAttributes, AttrTypes
FROM otel.otel_logs
WHERE RolloutId IN {rollouts:Array(String)} AND SpanId != '' AND startsWith(Event, 'gen_ai.') AND empty(Rewards)
ORDER BY RolloutId, AttemptId, Timestamp, BatchId, BatchPos
LIMIT 1 BY TraceId, SpanId, Timestamp, Event, Body, LogAttributes

-- Which of these spans are stored already, by attempt.
SELECT DISTINCT RolloutId, AttemptId, TraceId, SpanId FROM otel.otel_traces
WHERE RolloutId IN {rollouts:Array(String)} AND AttemptId IN {attempts:Array(String)} AND SpanId IN {spans:Array(String)}

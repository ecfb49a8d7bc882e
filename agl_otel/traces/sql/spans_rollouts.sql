-- What trace_rollouts.sql answers, of traces that were stored before schema 11: by the bloom filters of the spans' parts.
SELECT DISTINCT RolloutId FROM otel.otel_traces WHERE TraceId IN {traces:Array(String)}

-- The rollouts that have spans of some traces; an empty one stands for spans without ids. To look up in otel_traces_trace_id_ts when the traces
-- were, so that few bloom filters are opened, costs more than it saves: 55 ms instead of 23 for a trace of 5 million spans.
SELECT DISTINCT RolloutId FROM otel.otel_traces WHERE TraceId IN {traces:Array(String)}

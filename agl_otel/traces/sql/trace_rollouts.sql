-- The rollouts that have spans of some traces; an empty one stands for spans without ids. One thread: it
-- reads a granule of each part, which takes less than a second thread's start.
SELECT DISTINCT RolloutId FROM otel.otel_traces_trace_id_ts WHERE TraceId IN {traces:Array(String)} SETTINGS max_threads = 1

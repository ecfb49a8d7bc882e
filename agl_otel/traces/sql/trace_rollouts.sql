-- The rollouts that have spans of some traces; an empty one stands for spans without ids.
SELECT DISTINCT RolloutId FROM otel.otel_traces WHERE TraceId IN {traces:Array(String)}

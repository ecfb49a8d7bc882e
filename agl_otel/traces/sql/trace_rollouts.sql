-- The rollouts that have spans of some traces; an empty one stands for spans without ids. When the traces were is looked up first: rollout ids
-- are made in order of time, so the parts that may hold them are few, and the bloom filters of all others stay closed. Where that is not
-- known of each trace, or is beyond what a DateTime holds (it is kept at the bound), all are asked.
WITH (
  SELECT if(uniqExact(TraceId) < {count:UInt32}, (toDateTime(0), toDateTime(4294967295)), (min(Start), max(End)))
  FROM otel.otel_traces_trace_id_ts WHERE TraceId IN {traces:Array(String)}
) AS known
SELECT DISTINCT RolloutId
FROM otel.otel_traces
WHERE TraceId IN {traces:Array(String)}
  AND (toUInt32(known.1) = 0 OR Timestamp >= toDateTime64(known.1, 9))
  AND (toUInt32(known.2) = 4294967295 OR Timestamp < toDateTime64(known.2 + 1, 9)) -- as the column: else ClickHouse compares whole seconds

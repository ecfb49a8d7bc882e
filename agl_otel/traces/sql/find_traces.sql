-- The traces with a span that fits, the latest first; $where is put together by trace_query.py.
SELECT TraceId, toUnixTimestamp64Nano(min(Timestamp)) AS StartNano, toUnixTimestamp64Nano(max(Timestamp)) AS EndNano
FROM otel.otel_traces
WHERE TraceId != '' AND $where
GROUP BY TraceId
ORDER BY EndNano DESC, TraceId
LIMIT {limit:UInt32}

-- Which service called which, and how often, by spans whose parent is another service's.
SELECT Parent.ServiceName AS Caller, Child.ServiceName AS Callee, uniqExact(Child.TraceId, Child.SpanId) AS Calls
FROM (
  SELECT TraceId, SpanId, ParentSpanId, ServiceName FROM otel.otel_traces
  WHERE Timestamp BETWEEN fromUnixTimestamp64Nano({first:Int64}) AND fromUnixTimestamp64Nano({last:Int64}) AND ParentSpanId != ''
) AS Child
INNER JOIN (
  SELECT TraceId, SpanId, ServiceName FROM otel.otel_traces
  WHERE Timestamp BETWEEN fromUnixTimestamp64Nano({first:Int64}) AND fromUnixTimestamp64Nano({last:Int64})
) AS Parent ON Child.TraceId = Parent.TraceId AND Child.ParentSpanId = Parent.SpanId
WHERE Caller != Callee
GROUP BY Caller, Callee
ORDER BY Caller, Callee

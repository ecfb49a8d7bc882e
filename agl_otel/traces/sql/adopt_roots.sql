-- The root of each of some traces: the earliest span without a parent, else the earliest span; and the first conversation in it.
-- Columns of adopt.Root.
SELECT TraceId, Root.1, Root.2, Root.3, Root.4, Root.5, Conversation, toUnixTimestamp64Nano(First) / 1e9, toUnixTimestamp64Nano(Last) / 1e9
FROM (
  SELECT TraceId,
    argMin((SpanName, ServiceName, StatusCode, StatusMessage, mapFilter((key, value) -> key IN {inputs:Array(String)}, SpanAttributes)),
      (ParentSpanId != '', Timestamp, SpanId)) AS Root,
    argMinIf(ConversationId, (Timestamp, SpanId), ConversationId != '') AS Conversation,
    min(Timestamp) AS First, max(Timestamp + toIntervalNanosecond(Duration)) AS Last
  FROM otel.otel_traces
  WHERE TraceId IN {traces:Array(String)}
  GROUP BY TraceId
)
ORDER BY TraceId

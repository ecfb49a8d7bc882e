-- What some quiet traces become, a row for each rollout: columns of adopt.Quiet. A conversation is whole, with its traces that are on no
-- page yet; a trace is of the first conversation in it. Its root: the earliest span without a parent, else the earliest span.
-- {quiet} and {since} as in adopt_traces.sql.
SELECT Conversation, arrayMap(each -> each.2, arraySort(groupArray((First, TraceId)))) AS TraceIds,
  argMin(Root, (First, TraceId)) AS Opening, argMax(Outcome, (Last, TraceId)) AS Closing,
  toUnixTimestamp64Nano(min(First)) / 1e9, toUnixTimestamp64Nano(max(Last)) / 1e9
FROM (
  SELECT TraceId,
    argMin((SpanName, ServiceName, mapFilter((key, value) -> key IN {inputs:Array(String)}, SpanAttributes)), (ParentSpanId != '', Timestamp, SpanId)) AS Root,
    argMin((StatusCode, StatusMessage), (ParentSpanId != '', Timestamp, SpanId)) AS Outcome,
    argMinIf(ConversationId, (Timestamp, SpanId), ConversationId != '') AS Conversation,
    min(Timestamp) AS First, max(Timestamp + toIntervalNanosecond(Duration)) AS Last
  FROM otel.otel_traces
  WHERE TraceId IN {traces:Array(String)} OR TraceId IN (
    SELECT TraceId FROM otel.otel_traces
    WHERE RolloutId = '' AND ReceivedAt >= fromUnixTimestamp64Milli({since:Int64}) AND ConversationId IN (
      SELECT ConversationId FROM otel.otel_traces WHERE ConversationId != '' AND TraceId IN {traces:Array(String)}))
  GROUP BY TraceId
  HAVING max(ReceivedAt) <= fromUnixTimestamp64Milli({quiet:Int64})
    AND countIf(RolloutId NOT IN ('', concat({adopted:String}, TraceId)) AND NOT startsWith(RolloutId, {conversation:String})) = 0
    AND countIf(mapContains(SpanAttributes, {invalid:String})) = 0
    AND countIf(startsWith(SpanName, {train:String})) = 0
    AND uniqExact(SpanId) > uniqExactIf(SpanId, RolloutId != '')
)
GROUP BY Conversation, if(Conversation = '', TraceId, '')
HAVING hasAny(TraceIds, {traces:Array(String)})
ORDER BY TraceIds[1]

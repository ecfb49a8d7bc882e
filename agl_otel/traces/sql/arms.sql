-- Which LLMs of a set with canaries answered each conversation that went on after a time, or could not as canaries, which canaries were full,
-- and when: its rollout, once its traces have one, else its trace. Calls of the day before that time count, too. A span that was identified
-- later has two rows, with and without ids.
WITH if(SpanAttributes[{arm:String}] != '', SpanAttributes[{arm:String}], SpanAttributes[{served:String}]) AS Arm
SELECT if(Rollout = '', TraceId, Rollout) AS Conversation, any(Rollout) AS RolloutId, arraySort(groupUniqArrayArray(Arms)) AS Arms,
  arraySort(groupUniqArrayArray(FullOnes)) AS Full, toUnixTimestamp64Nano(min(First)) AS Began, toUnixTimestamp64Nano(max(Last)) AS Latest
FROM (
  SELECT TraceId, max(RolloutId) AS Rollout, groupUniqArrayArray(arrayFilter(x -> x != '', [Arm, SpanAttributes[{failed:String}]])) AS Arms,
    groupUniqArrayIf(SpanAttributes[{full:String}], SpanAttributes[{full:String}] != '') AS FullOnes, min(Timestamp) AS First,
    max(Timestamp) AS Last
  FROM otel.otel_traces
  WHERE Timestamp >= fromUnixTimestamp64Nano({since:Int64}) - INTERVAL 1 DAY AND Arm != ''
  GROUP BY TraceId
)
GROUP BY Conversation
HAVING max(Last) >= fromUnixTimestamp64Nano({since:Int64})
ORDER BY Conversation

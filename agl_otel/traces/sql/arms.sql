-- Which LLMs of a set with canaries answered each conversation that went on after a time, or could not as canaries, and since when; which
-- canaries were full; when it began, and went on. A conversation is its rollout, once its traces have one, else its trace. Calls of the day
-- before that time count, too. A span that was identified later has two rows, with and without ids.
SELECT if(Rollout = '', TraceId, Rollout) AS Conversation, any(Rollout) AS RolloutId, minMap(Firsts.1, Firsts.2) AS Asked,
  Asked.1 AS Arms, Asked.2 AS ArmNanos, arraySort(groupUniqArrayArray(Marks)) AS Full, min(First) AS Began, max(Last) AS Latest
FROM (
  WITH if(SpanAttributes[{arm:String}] != '', SpanAttributes[{arm:String}], SpanAttributes[{served_arm:String}]) AS Arm,
    arrayFilter(name -> name != '', [Arm, SpanAttributes[{canary_failed:String}]]) AS Names
  SELECT TraceId, max(RolloutId) AS Rollout, minMap(Names, arrayMap(_ -> toUnixTimestamp64Nano(Timestamp), Names)) AS Firsts,
    groupUniqArrayIf(SpanAttributes[{canary_full:String}], SpanAttributes[{canary_full:String}] != '') AS Marks,
    toUnixTimestamp64Nano(min(Timestamp)) AS First, toUnixTimestamp64Nano(max(Timestamp)) AS Last
  FROM otel.otel_traces
  WHERE Timestamp >= fromUnixTimestamp64Nano({since:Int64}) - INTERVAL 1 DAY AND Arm != ''
  GROUP BY TraceId
)
GROUP BY Conversation
HAVING Latest >= {since:Int64}
ORDER BY Conversation

-- The last review of each source by rubric and name, the latest first: feedback on whole attempts that has a value or a label, on some
-- rollouts (`rollouts` empty: all), under one rubric (empty: any), of some sources (empty: all). A record that was stored again counts once.
SELECT RolloutId, AttemptId, LogAttributes[{source:String}] AS Source, LogAttributes[{rubric_name:String}] AS Rubric,
  Rewards[{reward_name:String}] AS Name, max(toUnixTimestamp64Nano(Timestamp)) AS Time,
  argMax((Rewards[{reward_label:String}], Rewards[{reward:String}]), (Timestamp, BatchId, BatchPos)) AS Last, Last.1 AS Label, Last.2 AS Value
FROM otel.otel_logs
PREWHERE notEmpty(Rewards) AND RolloutId != '' AND (empty({rollouts:Array(String)}) OR RolloutId IN {rollouts:Array(String)})
WHERE Source != '' AND LogAttributes[{response:String}] = '' AND ({rubric:String} = '' OR Rubric = {rubric:String})
  AND (empty({sources:Array(String)}) OR Source IN {sources:Array(String)})
  AND (Rewards[{reward_label:String}] != '' OR Rewards[{reward:String}] != '')
GROUP BY RolloutId, AttemptId, Source, Rubric, Name
ORDER BY Time DESC, RolloutId, AttemptId, Source, Rubric, Name
LIMIT {limit:UInt32}

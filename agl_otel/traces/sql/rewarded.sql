-- Which of some rollouts have a reward, of some sources: {runner} or {agent} that came with the attempt, or those of feedback. None named: of all.
SELECT DISTINCT RolloutId FROM (
  SELECT RolloutId, if(mapContains(Rewards, {given:String}), {runner:String}, {agent:String}) AS Source
  FROM otel.otel_traces
  PREWHERE RolloutId IN {rollouts:Array(String)}
  WHERE mapContains(Rewards, {reward:String})
  UNION ALL
  SELECT RolloutId, if(mapContains(Rewards, {reward_source:String}), Rewards[{reward_source:String}], {agent:String})
  FROM otel.otel_logs
  PREWHERE RolloutId IN {rollouts:Array(String)}
  WHERE mapContains(Rewards, {reward:String})
)
WHERE empty({sources:Array(String)}) OR Source IN {sources:Array(String)}

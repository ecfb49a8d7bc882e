-- The attempts of the model calls with some responses, for those responses that only one attempt has.
SELECT Facts[{response:String}] AS Response, any(RolloutId) AS Rollout, any(AttemptId) AS Attempt
FROM otel.otel_traces
WHERE RolloutId != '' AND Facts[{response:String}] IN {responses:Array(String)}
GROUP BY Response
HAVING uniqExact(RolloutId, AttemptId) = 1

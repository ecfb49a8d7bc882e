-- What model servers answered instead of a reply: read only for rollouts with such a call.
SELECT RolloutId, AttemptId, SpanId, toInt64OrZero(SpanAttributes[{http_status:String}]) AS HttpStatus, left(StatusMessage, 300) AS Message
FROM otel.otel_traces
WHERE RolloutId IN {rollouts:Array(String)} AND mapContains(Facts, {call:String}) AND startsWith(Facts[{incomplete:String}], 'upstream_')
LIMIT 1 BY RolloutId, AttemptId, SpanId

-- All rows of some rollouts as verdicts, model calls, rewards and agents need them. Of the attributes only `Facts` is read: the map of all of
-- them is most of what is stored. Columns are returned as stored, and observed.py derives the rest from them: ClickHouse would evaluate each
-- expression once for every granule that is read, and random rollouts are a dozen rows of a granule each. Nothing is sorted, and nothing is
-- left out that is stored twice: with the tokens either takes several times their memory. tokens.distinct_in_order does both.
-- Evaluations that came as log records are rows, too (IsRecord): no spans, but rewards, of the span whose id is Evaluated.
SELECT RolloutId, AttemptId, SpanId, ParentSpanId, SequenceId, sipHash64(RolloutId, AttemptId, TraceId, SpanId) AS Identity,
  Timestamp, Duration, SpanName, Facts, Rewards, '' AS Evaluated, false AS IsRecord, HasMedia, PromptTokenIds, ResponseTokenIds, ResponseLogprobs
FROM otel.otel_traces
PREWHERE RolloutId IN {rollouts:Array(String)}
UNION ALL
SELECT RolloutId, AttemptId, '', '', SequenceId, sipHash64(RolloutId, AttemptId, TraceId, SpanId, Timestamp, toString(Rewards)),
  Timestamp, toUInt64(0), '', map(), Rewards, SpanId, true, false, [], [], []
FROM otel.otel_logs
PREWHERE RolloutId IN {rollouts:Array(String)}
WHERE notEmpty(Rewards)

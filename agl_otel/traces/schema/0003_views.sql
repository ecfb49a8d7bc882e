-- Targets hold idempotent states only (min, max, sets of identities): a repeated insert feeds them again, and recovery refills them by BatchId.
-- The SELECTs stand again in sql/refill_*.sql; a test compares them.
CREATE TABLE IF NOT EXISTS otel.otel_traces_trace_id_ts (
  TraceId String CODEC(ZSTD(1)),
  Start DateTime CODEC(Delta(4), ZSTD(1)),
  End DateTime CODEC(Delta(4), ZSTD(1)),
  ReceivedDay Date,
  INDEX idx_trace_id TraceId TYPE bloom_filter(0.01) GRANULARITY 1
) ENGINE = MergeTree PARTITION BY ReceivedDay ORDER BY (TraceId, Start) SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS otel.otel_traces_trace_id_ts_mv TO otel.otel_traces_trace_id_ts AS
SELECT TraceId, min(Timestamp) AS Start, max(Timestamp) AS End, toDate(ReceivedAt) AS ReceivedDay
FROM otel.otel_traces WHERE TraceId != '' GROUP BY TraceId, ReceivedDay;

CREATE TABLE IF NOT EXISTS otel.rollout_summary_states (
  RolloutId String,
  AttemptId String,
  Spans AggregateFunction(uniq, String, String),
  Errors AggregateFunction(uniq, String, String),
  Tokens AggregateFunction(groupUniqArray, Tuple(String, UInt32, UInt32)),
  FirstTime SimpleAggregateFunction(min, DateTime64(9)),
  LastTime SimpleAggregateFunction(max, DateTime64(9))
) ENGINE = AggregatingMergeTree ORDER BY (RolloutId, AttemptId);

CREATE MATERIALIZED VIEW IF NOT EXISTS otel.rollout_summary_mv TO otel.rollout_summary_states AS
SELECT RolloutId, AttemptId,
  uniqState(TraceId, SpanId) AS Spans,
  uniqStateIf(TraceId, SpanId, StatusCode = 'Error') AS Errors,
  groupUniqArrayStateIf(tuple(concat(TraceId, SpanId), toUInt32(length(PromptTokenIds)), toUInt32(length(ResponseTokenIds))), notEmpty(ResponseTokenIds)) AS Tokens,
  min(Timestamp) AS FirstTime,
  max(Timestamp + toIntervalNanosecond(Duration)) AS LastTime
FROM otel.otel_traces WHERE RolloutId != '' GROUP BY RolloutId, AttemptId;

CREATE VIEW IF NOT EXISTS otel.rollout_summary AS
SELECT RolloutId, AttemptId,
  uniqMerge(Spans) AS Spans,
  uniqMerge(Errors) AS Errors,
  arraySum(t -> t.2, groupUniqArrayMerge(Tokens) AS tokens) AS PromptTokens,
  arraySum(t -> t.3, tokens) AS ResponseTokens,
  min(FirstTime) AS FirstTime,
  max(LastTime) AS LastTime
FROM otel.rollout_summary_states GROUP BY RolloutId, AttemptId;

CREATE TABLE IF NOT EXISTS otel.services (
  ServiceName LowCardinality(String),
  SpanName LowCardinality(String),
  SpanKind LowCardinality(String),
  FirstTime SimpleAggregateFunction(min, DateTime64(9)),
  LastTime SimpleAggregateFunction(max, DateTime64(9))
) ENGINE = AggregatingMergeTree ORDER BY (ServiceName, SpanName, SpanKind);

CREATE MATERIALIZED VIEW IF NOT EXISTS otel.services_mv TO otel.services AS
SELECT ServiceName, SpanName, SpanKind, min(Timestamp) AS FirstTime, max(Timestamp) AS LastTime
FROM otel.otel_traces GROUP BY ServiceName, SpanName, SpanKind;

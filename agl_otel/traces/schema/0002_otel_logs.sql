-- The stock log table plus the ids: gen_ai message events travel as logs, and so does the agents' captured output.
-- SequenceId is the explicit one or 0: the rollout's counter counts spans only.
CREATE TABLE IF NOT EXISTS otel.otel_logs (
  Timestamp DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  TimestampTime DateTime DEFAULT toDateTime(Timestamp),
  TraceId String CODEC(ZSTD(1)),
  SpanId String CODEC(ZSTD(1)),
  TraceFlags UInt8,
  SeverityText LowCardinality(String) CODEC(ZSTD(1)),
  SeverityNumber UInt8,
  ServiceName LowCardinality(String) CODEC(ZSTD(1)),
  Body String CODEC(ZSTD(1)),
  ResourceSchemaUrl LowCardinality(String) CODEC(ZSTD(1)),
  ResourceAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ScopeSchemaUrl LowCardinality(String) CODEC(ZSTD(1)),
  ScopeName String CODEC(ZSTD(1)),
  ScopeVersion LowCardinality(String) CODEC(ZSTD(1)),
  ScopeAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  LogAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  EventName String CODEC(ZSTD(1)),
  RolloutId String DEFAULT if(mapContains(LogAttributes, 'agentlightning.rollout_id'),
    LogAttributes['agentlightning.rollout_id'], ResourceAttributes['agentlightning.rollout_id']) CODEC(ZSTD(1)),
  AttemptId String DEFAULT multiIf(
    NOT mapContains(LogAttributes, 'agentlightning.rollout_id'), ResourceAttributes['agentlightning.attempt_id'],
    mapContains(LogAttributes, 'agentlightning.attempt_id')
      OR LogAttributes['agentlightning.rollout_id'] != ResourceAttributes['agentlightning.rollout_id'], LogAttributes['agentlightning.attempt_id'],
    ResourceAttributes['agentlightning.attempt_id']) CODEC(ZSTD(1)),
  SequenceId UInt64 DEFAULT toUInt64OrZero(if(mapContains(LogAttributes, 'agentlightning.span_sequence_id'),
    LogAttributes['agentlightning.span_sequence_id'], ResourceAttributes['agentlightning.span_sequence_id'])) CODEC(Delta(8), ZSTD(1)),
  AttrTypes Map(LowCardinality(String), LowCardinality(String)) CODEC(ZSTD(1)),
  ReceivedAt DateTime64(3) DEFAULT now64(3),
  BatchId UInt64 DEFAULT 0,
  BatchPos UInt32 DEFAULT 0,
  INDEX idx_trace_id TraceId TYPE bloom_filter(0.001) GRANULARITY 1,
  INDEX idx_time Timestamp TYPE minmax GRANULARITY 64,
  INDEX idx_batch BatchId TYPE minmax GRANULARITY 64
) ENGINE = MergeTree
PARTITION BY toDate(ReceivedAt)
ORDER BY (RolloutId, AttemptId, Timestamp)
SETTINGS index_granularity = 512, ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000,
  fsync_after_insert = 1, fsync_part_directory = 1;

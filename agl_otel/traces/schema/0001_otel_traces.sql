-- The stock table of the OpenTelemetry Collector's ClickHouse exporter, plus columns with DEFAULT: the stock exporter, viewers and our writer share it.
-- Partitions go by the day of receipt: one insert touches one or two of them, whatever times the spans claim.
CREATE TABLE IF NOT EXISTS otel.otel_traces (
  Timestamp DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  TraceId String CODEC(ZSTD(1)),
  SpanId String CODEC(ZSTD(1)),
  ParentSpanId String CODEC(ZSTD(1)),
  TraceState String CODEC(ZSTD(1)),
  SpanName LowCardinality(String) CODEC(ZSTD(1)),
  SpanKind LowCardinality(String) CODEC(ZSTD(1)),
  ServiceName LowCardinality(String) CODEC(ZSTD(1)),
  ResourceAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ScopeName String CODEC(ZSTD(1)),
  ScopeVersion String CODEC(ZSTD(1)),
  SpanAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  Duration UInt64 CODEC(T64, ZSTD(1)),
  StatusCode LowCardinality(String) CODEC(ZSTD(1)),
  StatusMessage String CODEC(ZSTD(1)),
  Events Nested(Timestamp DateTime64(9), Name LowCardinality(String), Attributes Map(LowCardinality(String), String)) CODEC(ZSTD(1)),
  Links Nested(TraceId String, SpanId String, TraceState String, Attributes Map(LowCardinality(String), String)) CODEC(ZSTD(1)),
  RolloutId String DEFAULT if(mapContains(SpanAttributes, 'agentlightning.rollout_id'),
    SpanAttributes['agentlightning.rollout_id'], ResourceAttributes['agentlightning.rollout_id']) CODEC(ZSTD(1)),
  AttemptId String DEFAULT multiIf(
    NOT mapContains(SpanAttributes, 'agentlightning.rollout_id'), ResourceAttributes['agentlightning.attempt_id'],
    mapContains(SpanAttributes, 'agentlightning.attempt_id')
      OR SpanAttributes['agentlightning.rollout_id'] != ResourceAttributes['agentlightning.rollout_id'], SpanAttributes['agentlightning.attempt_id'],
    ResourceAttributes['agentlightning.attempt_id']) CODEC(ZSTD(1)),
  SequenceId UInt64 DEFAULT toUInt64OrZero(if(mapContains(SpanAttributes, 'agentlightning.span_sequence_id'),
    SpanAttributes['agentlightning.span_sequence_id'], ResourceAttributes['agentlightning.span_sequence_id'])) CODEC(Delta(8), ZSTD(1)),
  PromptTokenIds Array(UInt32) DEFAULT JSONExtract(SpanAttributes['agentlightning.llm.prompt_token_ids'], 'Array(UInt32)') CODEC(T64, ZSTD(1)),
  ResponseTokenIds Array(UInt32) DEFAULT JSONExtract(SpanAttributes['agentlightning.llm.response_token_ids'], 'Array(UInt32)') CODEC(T64, ZSTD(1)),
  ResponseLogprobs Array(Float32) DEFAULT JSONExtract(SpanAttributes['agentlightning.llm.response_logprobs'], 'Array(Float32)') CODEC(ZSTD(1)),
  AttrTypes Map(LowCardinality(String), LowCardinality(String)) CODEC(ZSTD(1)),
  ReceivedAt DateTime64(3) DEFAULT now64(3),
  BatchId UInt64 DEFAULT 0,
  BatchPos UInt32 DEFAULT 0,
  INDEX idx_trace_id TraceId TYPE bloom_filter(0.001) GRANULARITY 1,
  INDEX idx_time Timestamp TYPE minmax GRANULARITY 64,
  INDEX idx_batch BatchId TYPE minmax GRANULARITY 64
) ENGINE = MergeTree
PARTITION BY toDate(ReceivedAt)
ORDER BY (RolloutId, AttemptId, SequenceId, Timestamp)
SETTINGS index_granularity = 512, ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000,
  fsync_after_insert = 1, fsync_part_directory = 1;

-- The stock metric tables of the OpenTelemetry Collector's ClickHouse exporter, one for each kind of metric, one row for each data point;
-- plus the ids of the rollout (from the resource) and what recovery needs. Partitions go by the day of receipt, like those of the traces.
CREATE TABLE IF NOT EXISTS otel.otel_metrics_gauge (
  ResourceAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ResourceSchemaUrl String CODEC(ZSTD(1)),
  ScopeName String CODEC(ZSTD(1)),
  ScopeVersion String CODEC(ZSTD(1)),
  ScopeAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ScopeDroppedAttrCount UInt32 CODEC(ZSTD(1)),
  ScopeSchemaUrl String CODEC(ZSTD(1)),
  ServiceName LowCardinality(String) CODEC(ZSTD(1)),
  MetricName LowCardinality(String) CODEC(ZSTD(1)),
  MetricDescription String CODEC(ZSTD(1)),
  MetricUnit String CODEC(ZSTD(1)),
  Attributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  StartTimeUnix DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  TimeUnix DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  Value Float64 CODEC(ZSTD(1)),
  Flags UInt32 CODEC(ZSTD(1)),
  Exemplars Nested(FilteredAttributes Map(LowCardinality(String), String), TimeUnix DateTime64(9), Value Float64, SpanId String, TraceId String)
    CODEC(ZSTD(1)),
  RolloutId String DEFAULT if(match(ResourceAttributes['agentlightning.rollout_id'], '^[A-Za-z0-9._:-]{1,128}$'),
    ResourceAttributes['agentlightning.rollout_id'], '') CODEC(ZSTD(1)),
  AttemptId String DEFAULT if(RolloutId != '' AND match(ResourceAttributes['agentlightning.attempt_id'], '^[A-Za-z0-9._:-]{1,128}$'),
    ResourceAttributes['agentlightning.attempt_id'], '') CODEC(ZSTD(1)),
  ReceivedAt DateTime64(3) DEFAULT now64(3),
  BatchId UInt64 DEFAULT 0,
  BatchPos UInt32 DEFAULT 0,
  INDEX idx_rollout RolloutId TYPE bloom_filter(0.01) GRANULARITY 1,
  INDEX idx_batch BatchId TYPE minmax GRANULARITY 64
) ENGINE = MergeTree
PARTITION BY toDate(ReceivedAt)
ORDER BY (ServiceName, MetricName, toStartOfHour(TimeUnix), cityHash64(Attributes), TimeUnix)
SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000,
  fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS otel.otel_metrics_sum (
  ResourceAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ResourceSchemaUrl String CODEC(ZSTD(1)),
  ScopeName String CODEC(ZSTD(1)),
  ScopeVersion String CODEC(ZSTD(1)),
  ScopeAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ScopeDroppedAttrCount UInt32 CODEC(ZSTD(1)),
  ScopeSchemaUrl String CODEC(ZSTD(1)),
  ServiceName LowCardinality(String) CODEC(ZSTD(1)),
  MetricName LowCardinality(String) CODEC(ZSTD(1)),
  MetricDescription String CODEC(ZSTD(1)),
  MetricUnit String CODEC(ZSTD(1)),
  Attributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  StartTimeUnix DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  TimeUnix DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  Value Float64 CODEC(ZSTD(1)),
  Flags UInt32 CODEC(ZSTD(1)),
  Exemplars Nested(FilteredAttributes Map(LowCardinality(String), String), TimeUnix DateTime64(9), Value Float64, SpanId String, TraceId String)
    CODEC(ZSTD(1)),
  AggregationTemporality Int32 CODEC(ZSTD(1)),
  IsMonotonic Bool CODEC(ZSTD(1)),
  RolloutId String DEFAULT if(match(ResourceAttributes['agentlightning.rollout_id'], '^[A-Za-z0-9._:-]{1,128}$'),
    ResourceAttributes['agentlightning.rollout_id'], '') CODEC(ZSTD(1)),
  AttemptId String DEFAULT if(RolloutId != '' AND match(ResourceAttributes['agentlightning.attempt_id'], '^[A-Za-z0-9._:-]{1,128}$'),
    ResourceAttributes['agentlightning.attempt_id'], '') CODEC(ZSTD(1)),
  ReceivedAt DateTime64(3) DEFAULT now64(3),
  BatchId UInt64 DEFAULT 0,
  BatchPos UInt32 DEFAULT 0,
  INDEX idx_rollout RolloutId TYPE bloom_filter(0.01) GRANULARITY 1,
  INDEX idx_batch BatchId TYPE minmax GRANULARITY 64
) ENGINE = MergeTree
PARTITION BY toDate(ReceivedAt)
ORDER BY (ServiceName, MetricName, toStartOfHour(TimeUnix), cityHash64(Attributes), TimeUnix)
SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000,
  fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS otel.otel_metrics_histogram (
  ResourceAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ResourceSchemaUrl String CODEC(ZSTD(1)),
  ScopeName String CODEC(ZSTD(1)),
  ScopeVersion String CODEC(ZSTD(1)),
  ScopeAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ScopeDroppedAttrCount UInt32 CODEC(ZSTD(1)),
  ScopeSchemaUrl String CODEC(ZSTD(1)),
  ServiceName LowCardinality(String) CODEC(ZSTD(1)),
  MetricName LowCardinality(String) CODEC(ZSTD(1)),
  MetricDescription String CODEC(ZSTD(1)),
  MetricUnit String CODEC(ZSTD(1)),
  Attributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  StartTimeUnix DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  TimeUnix DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  Count UInt64 CODEC(Delta(8), ZSTD(1)),
  Sum Float64 CODEC(ZSTD(1)),
  BucketCounts Array(UInt64) CODEC(ZSTD(1)),
  ExplicitBounds Array(Float64) CODEC(ZSTD(1)),
  Exemplars Nested(FilteredAttributes Map(LowCardinality(String), String), TimeUnix DateTime64(9), Value Float64, SpanId String, TraceId String)
    CODEC(ZSTD(1)),
  Flags UInt32 CODEC(ZSTD(1)),
  Min Float64 CODEC(ZSTD(1)),
  Max Float64 CODEC(ZSTD(1)),
  AggregationTemporality Int32 CODEC(ZSTD(1)),
  RolloutId String DEFAULT if(match(ResourceAttributes['agentlightning.rollout_id'], '^[A-Za-z0-9._:-]{1,128}$'),
    ResourceAttributes['agentlightning.rollout_id'], '') CODEC(ZSTD(1)),
  AttemptId String DEFAULT if(RolloutId != '' AND match(ResourceAttributes['agentlightning.attempt_id'], '^[A-Za-z0-9._:-]{1,128}$'),
    ResourceAttributes['agentlightning.attempt_id'], '') CODEC(ZSTD(1)),
  ReceivedAt DateTime64(3) DEFAULT now64(3),
  BatchId UInt64 DEFAULT 0,
  BatchPos UInt32 DEFAULT 0,
  INDEX idx_rollout RolloutId TYPE bloom_filter(0.01) GRANULARITY 1,
  INDEX idx_batch BatchId TYPE minmax GRANULARITY 64
) ENGINE = MergeTree
PARTITION BY toDate(ReceivedAt)
ORDER BY (ServiceName, MetricName, toStartOfHour(TimeUnix), cityHash64(Attributes), TimeUnix)
SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000,
  fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS otel.otel_metrics_exponential_histogram (
  ResourceAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ResourceSchemaUrl String CODEC(ZSTD(1)),
  ScopeName String CODEC(ZSTD(1)),
  ScopeVersion String CODEC(ZSTD(1)),
  ScopeAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ScopeDroppedAttrCount UInt32 CODEC(ZSTD(1)),
  ScopeSchemaUrl String CODEC(ZSTD(1)),
  ServiceName LowCardinality(String) CODEC(ZSTD(1)),
  MetricName LowCardinality(String) CODEC(ZSTD(1)),
  MetricDescription String CODEC(ZSTD(1)),
  MetricUnit String CODEC(ZSTD(1)),
  Attributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  StartTimeUnix DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  TimeUnix DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  Count UInt64 CODEC(Delta(8), ZSTD(1)),
  Sum Float64 CODEC(ZSTD(1)),
  Scale Int32 CODEC(ZSTD(1)),
  ZeroCount UInt64 CODEC(ZSTD(1)),
  PositiveOffset Int32 CODEC(ZSTD(1)),
  PositiveBucketCounts Array(UInt64) CODEC(ZSTD(1)),
  NegativeOffset Int32 CODEC(ZSTD(1)),
  NegativeBucketCounts Array(UInt64) CODEC(ZSTD(1)),
  Exemplars Nested(FilteredAttributes Map(LowCardinality(String), String), TimeUnix DateTime64(9), Value Float64, SpanId String, TraceId String)
    CODEC(ZSTD(1)),
  Flags UInt32 CODEC(ZSTD(1)),
  Min Float64 CODEC(ZSTD(1)),
  Max Float64 CODEC(ZSTD(1)),
  AggregationTemporality Int32 CODEC(ZSTD(1)),
  RolloutId String DEFAULT if(match(ResourceAttributes['agentlightning.rollout_id'], '^[A-Za-z0-9._:-]{1,128}$'),
    ResourceAttributes['agentlightning.rollout_id'], '') CODEC(ZSTD(1)),
  AttemptId String DEFAULT if(RolloutId != '' AND match(ResourceAttributes['agentlightning.attempt_id'], '^[A-Za-z0-9._:-]{1,128}$'),
    ResourceAttributes['agentlightning.attempt_id'], '') CODEC(ZSTD(1)),
  ReceivedAt DateTime64(3) DEFAULT now64(3),
  BatchId UInt64 DEFAULT 0,
  BatchPos UInt32 DEFAULT 0,
  INDEX idx_rollout RolloutId TYPE bloom_filter(0.01) GRANULARITY 1,
  INDEX idx_batch BatchId TYPE minmax GRANULARITY 64
) ENGINE = MergeTree
PARTITION BY toDate(ReceivedAt)
ORDER BY (ServiceName, MetricName, toStartOfHour(TimeUnix), cityHash64(Attributes), TimeUnix)
SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000,
  fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS otel.otel_metrics_summary (
  ResourceAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ResourceSchemaUrl String CODEC(ZSTD(1)),
  ScopeName String CODEC(ZSTD(1)),
  ScopeVersion String CODEC(ZSTD(1)),
  ScopeAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  ScopeDroppedAttrCount UInt32 CODEC(ZSTD(1)),
  ScopeSchemaUrl String CODEC(ZSTD(1)),
  ServiceName LowCardinality(String) CODEC(ZSTD(1)),
  MetricName LowCardinality(String) CODEC(ZSTD(1)),
  MetricDescription String CODEC(ZSTD(1)),
  MetricUnit String CODEC(ZSTD(1)),
  Attributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
  StartTimeUnix DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  TimeUnix DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  Count UInt64 CODEC(Delta(8), ZSTD(1)),
  Sum Float64 CODEC(ZSTD(1)),
  ValueAtQuantiles Nested(Quantile Float64, Value Float64) CODEC(ZSTD(1)),
  Flags UInt32 CODEC(ZSTD(1)),
  RolloutId String DEFAULT if(match(ResourceAttributes['agentlightning.rollout_id'], '^[A-Za-z0-9._:-]{1,128}$'),
    ResourceAttributes['agentlightning.rollout_id'], '') CODEC(ZSTD(1)),
  AttemptId String DEFAULT if(RolloutId != '' AND match(ResourceAttributes['agentlightning.attempt_id'], '^[A-Za-z0-9._:-]{1,128}$'),
    ResourceAttributes['agentlightning.attempt_id'], '') CODEC(ZSTD(1)),
  ReceivedAt DateTime64(3) DEFAULT now64(3),
  BatchId UInt64 DEFAULT 0,
  BatchPos UInt32 DEFAULT 0,
  INDEX idx_rollout RolloutId TYPE bloom_filter(0.01) GRANULARITY 1,
  INDEX idx_batch BatchId TYPE minmax GRANULARITY 64
) ENGINE = MergeTree
PARTITION BY toDate(ReceivedAt)
ORDER BY (ServiceName, MetricName, toStartOfHour(TimeUnix), cityHash64(Attributes), TimeUnix)
SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000,
  fsync_after_insert = 1, fsync_part_directory = 1;

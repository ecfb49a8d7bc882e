-- The stock table of the OpenTelemetry Collector's ClickHouse exporter, plus columns with DEFAULT: the stock exporter, viewers and our writer share it.
-- A row is a span, with one exception: a span that got its ids after it was stored, or was adopted, is stored again with them, and its row without
-- ids (RolloutId = '', the same TraceId, SpanId, BatchId and BatchPos) stays. So count uniqExact(TraceId, SpanId), and read WHERE RolloutId != '', or
-- all spans once: ORDER BY TraceId, SpanId, RolloutId = '' LIMIT 1 BY TraceId, SpanId.
-- Partitions go by the day of receipt: one insert touches one or two of them, whatever times the spans claim.
-- Reading whole rollouts costs the bytes around the wanted rows, a granule for each rollout. So Facts, a small column beside the map of all
-- attributes, has what verdicts, calls and rewards are made of; the columns that every such read needs are LZ4, which unpacks several times
-- faster than ZSTD, in blocks of about one granule (min_compress_block_size).
-- Rewards says what a reward is: the attributes agentlightning.reward.* if one is a value, else the events gen_ai.evaluation.result in that form, the last first,
-- those without a number (no score, and a label that stands for none) last, with their label, time and response id. otel_logs has the same of records, and the source of feedback.
-- A batch (32 MiB at most) becomes a compact part: one file to sync instead of a hundred. Merging a row once costs more CPU than inserting it,
-- so merges wait for about a dozen parts of a size instead of five (merge_selector_base); old parts are merged all the same when idle.
CREATE TABLE IF NOT EXISTS otel.otel_traces (
  Timestamp DateTime64(9) CODEC(Delta(8), ZSTD(1)),
  TraceId String CODEC(LZ4),
  SpanId String CODEC(LZ4),
  ParentSpanId String CODEC(LZ4),
  TraceState String CODEC(ZSTD(1)),
  SpanName LowCardinality(String) CODEC(LZ4),
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
    SpanAttributes['agentlightning.rollout_id'], ResourceAttributes['agentlightning.rollout_id']) CODEC(LZ4),
  AttemptId String DEFAULT multiIf(
    NOT mapContains(SpanAttributes, 'agentlightning.rollout_id'), ResourceAttributes['agentlightning.attempt_id'],
    mapContains(SpanAttributes, 'agentlightning.attempt_id')
      OR SpanAttributes['agentlightning.rollout_id'] != ResourceAttributes['agentlightning.rollout_id'], SpanAttributes['agentlightning.attempt_id'],
    ResourceAttributes['agentlightning.attempt_id']) CODEC(LZ4),
  SequenceId UInt64 DEFAULT toUInt64OrZero(if(mapContains(SpanAttributes, 'agentlightning.span_sequence_id'),
    SpanAttributes['agentlightning.span_sequence_id'], ResourceAttributes['agentlightning.span_sequence_id'])) CODEC(Delta(8), LZ4),
  PromptTokenIds Array(UInt32) DEFAULT JSONExtract(SpanAttributes['agentlightning.llm.prompt_token_ids'], 'Array(UInt32)') CODEC(T64, LZ4),
  ResponseTokenIds Array(UInt32) DEFAULT JSONExtract(SpanAttributes['agentlightning.llm.response_token_ids'], 'Array(UInt32)') CODEC(T64, LZ4),
  ResponseLogprobs Array(Float32) DEFAULT JSONExtract(SpanAttributes['agentlightning.llm.response_logprobs'], 'Array(Float32)') CODEC(LZ4),
  AttrTypes Map(LowCardinality(String), LowCardinality(String)) CODEC(ZSTD(1)),
  ReceivedAt DateTime64(3) DEFAULT now64(3),
  BatchId UInt64 DEFAULT 0,
  BatchPos UInt32 DEFAULT 0,
  Facts Map(LowCardinality(String), String) DEFAULT mapFilter((key, value) ->
    key IN ('agentlightning.process', 'agentlightning.late', 'agentlightning.attempt.hooked', 'agentlightning.seal.spans',
      'agentlightning.seal.dropped', 'agentlightning.seal.closing', 'agentlightning.llm.caller',
      'agentlightning.llm.call', 'agentlightning.llm.choice', 'agentlightning.llm.prefix_call', 'agentlightning.llm.prefix_choice',
      'agentlightning.llm.model_version', 'agentlightning.llm.incomplete', 'agentlightning.llm.retry_of', 'gen_ai.agent.name',
      'agent.name', 'gen_ai.workflow.name', 'traceloop.association.properties.langgraph_node', 'traceloop.association.properties.ls_integration',
      'gen_ai.response.finish_reasons', 'gen_ai.request.temperature', 'gen_ai.request.top_p',
      'agentlightning.llm.sampling', 'gen_ai.usage.input_tokens', 'gen_ai.usage.output_tokens', 'gen_ai.response.id')
    OR startsWith(key, 'agentlightning.reward.'), SpanAttributes) CODEC(LZ4),
  HasMedia Bool
    DEFAULT multiSearchAny(SpanAttributes['gen_ai.input.messages'], ['"image', '"input_image', '"blob"', '"uri"', '"file"', '"audio', '"input_audio', '"video', '"input_video']),
  ConversationId String DEFAULT SpanAttributes['gen_ai.conversation.id'] CODEC(LZ4),
  Rewards Map(LowCardinality(String), String) DEFAULT multiIf(
    mapExists((key, value) -> match(key, '^agentlightning\\.reward\\.(0|[1-9][0-9]{0,8})\\.value$'), Facts), mapFilter((key, value) -> startsWith(key, 'agentlightning.reward.'), Facts),
    has(Events.Name, 'gen_ai.evaluation.result'), CAST(arrayMap(results -> arrayFlatten(arrayMap((result, place) -> arrayFilter(pair -> pair.2 != '', [
        (concat('agentlightning.reward.', toString(place - 1), '.name'), result.3['gen_ai.evaluation.name']),
        (concat('agentlightning.reward.', toString(place - 1), '.value'), result.1),
        (concat('agentlightning.reward.', toString(place - 1), '.label'), result.3['gen_ai.evaluation.score.label']),
        (concat('agentlightning.reward.', toString(place - 1), '.time'), toString(toUnixTimestamp64Nano(result.2))),
        (concat('agentlightning.reward.', toString(place - 1), '.response'), result.3['gen_ai.response.id'])]), results, arrayEnumerate(results))),
      [arrayReverseSort(result -> (result.1 != '', result.2, result.3['gen_ai.evaluation.name'], isNaN(toFloat64OrZero(result.1)), toFloat64OrZero(result.1)), arrayMap(event -> (
        multiIf(isNotNull(toFloat64OrNull(event.3['gen_ai.evaluation.score.value'])), event.3['gen_ai.evaluation.score.value'],
          lower(event.3['gen_ai.evaluation.score.label']) IN ('pass', 'passed', 'true', 'yes', 'correct', 'relevant', 'success', 'succeeded'), '1',
          lower(event.3['gen_ai.evaluation.score.label']) IN ('fail', 'failed', 'false', 'no', 'incorrect', 'not_relevant', 'irrelevant', 'failure'), '0', ''),
          event.2, event.3),
        arrayFilter(event -> event.1 = 'gen_ai.evaluation.result', arrayZip(Events.Name, Events.Timestamp, Events.Attributes))))])[1]
      AS Map(LowCardinality(String), String)),
    CAST(map() AS Map(LowCardinality(String), String))) CODEC(LZ4),
  INDEX idx_trace_id TraceId TYPE bloom_filter(0.001) GRANULARITY 1,
  INDEX idx_conversation ConversationId TYPE bloom_filter(0.001) GRANULARITY 1,
  INDEX idx_time Timestamp TYPE minmax GRANULARITY 64,
  INDEX idx_batch BatchId TYPE minmax GRANULARITY 64
) ENGINE = MergeTree
PARTITION BY toDate(ReceivedAt)
ORDER BY (RolloutId, AttemptId, SequenceId, Timestamp)
SETTINGS index_granularity = 512, ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000,
  fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1,
  min_bytes_for_wide_part = 67108864, merge_selector_base = 12, min_compress_block_size = 16384;

-- The stock log table plus the ids: gen_ai message events travel as logs, and so does the agents' captured output.
-- SequenceId is the explicit one or 0: the rollout's counter counts spans only. A record that got its ids later has two rows, as a span has.
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
  Rewards Map(LowCardinality(String), String) DEFAULT if(if(EventName != '', EventName, LogAttributes['event.name']) = 'gen_ai.evaluation.result',
    CAST(arrayFilter(pair -> pair.2 != '', [
      ('agentlightning.reward.0.name', LogAttributes['gen_ai.evaluation.name']),
      ('agentlightning.reward.0.value', multiIf(isNotNull(toFloat64OrNull(LogAttributes['gen_ai.evaluation.score.value'])), LogAttributes['gen_ai.evaluation.score.value'],
        lower(LogAttributes['gen_ai.evaluation.score.label']) IN ('pass', 'passed', 'true', 'yes', 'correct', 'relevant', 'success', 'succeeded'), '1',
        lower(LogAttributes['gen_ai.evaluation.score.label']) IN ('fail', 'failed', 'false', 'no', 'incorrect', 'not_relevant', 'irrelevant', 'failure'), '0', '')),
      ('agentlightning.reward.0.label', LogAttributes['gen_ai.evaluation.score.label']),
      ('agentlightning.reward.0.time', toString(toUnixTimestamp64Nano(Timestamp))),
      ('agentlightning.reward.0.response', LogAttributes['gen_ai.response.id']),
      ('agentlightning.reward.0.source', LogAttributes['agentlightning.feedback.source'])]) AS Map(LowCardinality(String), String)),
    CAST(map() AS Map(LowCardinality(String), String))) CODEC(LZ4),
  INDEX idx_trace_id TraceId TYPE bloom_filter(0.001) GRANULARITY 1,
  INDEX idx_time Timestamp TYPE minmax GRANULARITY 64,
  INDEX idx_batch BatchId TYPE minmax GRANULARITY 64
) ENGINE = MergeTree
PARTITION BY toDate(ReceivedAt)
ORDER BY (RolloutId, AttemptId, Timestamp)
SETTINGS index_granularity = 512, ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000,
  fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1, merge_selector_base = 12;

-- Targets hold idempotent states only (min, max, sets of identities): a repeated insert feeds them again, and recovery refills them by BatchId.
-- The SELECTs stand again in refill_*.sql; a test compares them. Views write to disk with the rows they derive from, because the log forgets a
-- batch after its insert and recovery refills only what the log still holds.
-- The rollouts of a trace stand beside its times: its spans are found by them in a quarter of the time that otel_traces' bloom filters take.
CREATE TABLE IF NOT EXISTS otel.otel_traces_trace_id_ts (
  TraceId String CODEC(ZSTD(1)),
  Start DateTime CODEC(Delta(4), ZSTD(1)),
  End DateTime CODEC(Delta(4), ZSTD(1)),
  ReceivedDay Date,
  RolloutId String CODEC(LZ4)
) ENGINE = MergeTree PARTITION BY ReceivedDay ORDER BY (TraceId, Start)
SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1, merge_selector_base = 12,
  fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS otel.otel_traces_trace_id_ts_mv TO otel.otel_traces_trace_id_ts AS
SELECT TraceId, min(Timestamp) AS Start, max(Timestamp) AS End, toDate(ReceivedAt) AS ReceivedDay, RolloutId
FROM otel.otel_traces WHERE TraceId != '' GROUP BY TraceId, ReceivedDay, RolloutId;

CREATE TABLE IF NOT EXISTS otel.rollout_summary_states (
  RolloutId String,
  AttemptId String,
  Spans AggregateFunction(uniq, String, String),
  Errors AggregateFunction(uniq, String, String),
  Tokens AggregateFunction(groupUniqArray, Tuple(String, UInt32, UInt32)),
  FirstTime SimpleAggregateFunction(min, DateTime64(9)),
  LastTime SimpleAggregateFunction(max, DateTime64(9))
) ENGINE = AggregatingMergeTree ORDER BY (RolloutId, AttemptId)
SETTINGS fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1, merge_selector_base = 12;

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
) ENGINE = AggregatingMergeTree ORDER BY (ServiceName, SpanName, SpanKind)
SETTINGS fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1, merge_selector_base = 12;

CREATE MATERIALIZED VIEW IF NOT EXISTS otel.services_mv TO otel.services AS
SELECT ServiceName, SpanName, SpanKind, min(Timestamp) AS FirstTime, max(Timestamp) AS LastTime
FROM otel.otel_traces GROUP BY ServiceName, SpanName, SpanKind;

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
  fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1;

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
  fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1;

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
  fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1;

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
  fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1;

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
  fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1;

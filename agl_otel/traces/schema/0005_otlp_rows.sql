-- OTLP bytes in, rows of otel_traces out: ClickHouse parses protobuf at a fifth of what it costs to build rows outside.
-- What arrives is described by otlp_rows.proto. The texts are those of the collector's values.py, to the byte; a property test compares them.
-- Every expression here is analysed anew at each insert (a millisecond or so apiece): what is rare is left to the writer.
CREATE TABLE IF NOT EXISTS otel.otlp_rows (
  batch_id UInt64,
  received_ms Int64,
  resource_spans Array(Tuple(
    prepared Tuple(attributes Array(Tuple(key String, value String)), types Array(Tuple(key String, value String))),
    scope_spans Array(Tuple(
      scope Tuple(name String, version String),
      spans Array(Tuple(
        trace_id String, span_id String, trace_state String, parent_span_id String, name String, kind Int32,
        start_time_unix_nano UInt64, end_time_unix_nano UInt64,
        attributes Array(Tuple(key String, value Tuple(
          string_value String, bool_value Bool, int_value Int64, double_value Float64,
          array_value Tuple(values Array(Tuple(
            string_value String, bool_value Bool, int_value Int64, double_value Float64,
            value Enum8('none' = 0, 'string_value' = 1, 'bool_value' = 2, 'int_value' = 3, 'double_value' = 4, 'string_value_strindex' = 8)))),
          value Enum8('none' = 0, 'string_value' = 1, 'bool_value' = 2, 'int_value' = 3, 'double_value' = 4, 'array_value' = 5,
            'string_value_strindex' = 8)))),
        status Tuple(message String, code Int32),
        rollout_id String, attempt_id String, sequence_id UInt64, row UInt32,
        tokens Tuple(prompt_token_ids Array(UInt32), response_token_ids Array(UInt32), response_logprobs Array(Float32), columns Array(String))))))))
) ENGINE = Null;

CREATE MATERIALIZED VIEW IF NOT EXISTS otel.otlp_rows_mv TO otel.otel_traces AS
SELECT
  fromUnixTimestamp64Nano(toInt64(span.start_time_unix_nano)) AS Timestamp,
  lower(hex(span.trace_id)) AS TraceId,
  lower(hex(span.span_id)) AS SpanId,
  if(span.parent_span_id = '\0\0\0\0\0\0\0\0', '', lower(hex(span.parent_span_id))) AS ParentSpanId,
  span.trace_state AS TraceState,
  span.name AS SpanName,
  transform(span.kind, [1, 2, 3, 4, 5], ['Internal', 'Server', 'Client', 'Producer', 'Consumer'], 'Unspecified') AS SpanKind,
  ResourceAttributes['service.name'] AS ServiceName,
  ResourceAttributes,
  part.scope.name AS ScopeName,
  part.scope.version AS ScopeVersion,
  CAST(arrayMap(attribute -> (attribute.key, multiIf(
    attribute.value.value = 'string_value', attribute.value.string_value,
    attribute.value.value = 'int_value', toString(attribute.value.int_value),
    attribute.value.value = 'double_value', toString(attribute.value.double_value),
    attribute.value.value = 'bool_value', toString(attribute.value.bool_value),
    attribute.value.value = 'array_value', concat('[', arrayStringConcat(arrayMap(item -> multiIf(
      item.value = 'string_value', replaceAll(toJSONString(item.string_value), '\\/', '/'),
      item.value = 'int_value', toString(item.int_value),
      item.value = 'double_value', concat(toString(item.double_value), if(match(toString(item.double_value), '[.e]'), '', '.0')),
      item.value = 'bool_value', toString(item.bool_value),
      'null'), attribute.value.array_value.values), ','), ']'),
    '')), attributes), 'Map(LowCardinality(String), String)') AS SpanAttributes,
  greatest(span.end_time_unix_nano, span.start_time_unix_nano) - span.start_time_unix_nano AS Duration,
  transform(span.status.code, [1, 2], ['Ok', 'Error'], 'Unset') AS StatusCode,
  span.status.message AS StatusMessage,
  span.rollout_id AS RolloutId,
  span.attempt_id AS AttemptId,
  span.sequence_id AS SequenceId,
  span.tokens.prompt_token_ids AS PromptTokenIds,
  span.tokens.response_token_ids AS ResponseTokenIds,
  span.tokens.response_logprobs AS ResponseLogprobs,
  CAST(arrayConcat(
    resource_types,
    arrayMap(name -> (name, 'column'), span.tokens.columns),
    arrayMap(attribute -> (
      if(match(attribute.key, '^(resource|span|scope|event\\.[0-9]+|link\\.[0-9]+):'), concat('span:', attribute.key), attribute.key),
      transform(attribute.value.value, ['int_value', 'double_value', 'bool_value', 'array_value'], ['int', 'double', 'bool', 'array'], 'empty')),
      arrayFilter(attribute -> attribute.value.value != 'string_value', attributes))),
    'Map(LowCardinality(String), LowCardinality(String))') AS AttrTypes,
  fromUnixTimestamp64Milli(received_ms) AS ReceivedAt,
  batch_id AS BatchId,
  span.row - 1 AS BatchPos
FROM (
  SELECT batch_id, received_ms, ResourceAttributes, resource_types, part, span,
    arrayFilter((attribute, times) -> times = 1, span.attributes, arrayEnumerateUniq(span.attributes.key)) AS attributes
  FROM (
    SELECT batch_id, received_ms, group.prepared.types AS resource_types, part,
      CAST(group.prepared.attributes, 'Map(LowCardinality(String), String)') AS ResourceAttributes
    FROM (SELECT batch_id, received_ms, group FROM otel.otlp_rows ARRAY JOIN resource_spans AS group)
    ARRAY JOIN group.scope_spans AS part
  ) ARRAY JOIN part.spans AS span
  WHERE span.row > 0
);

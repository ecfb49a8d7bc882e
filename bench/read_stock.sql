-- The same rows in the default table of the OpenTelemetry Collector's ClickHouse exporter: token ids and log-probs are texts there.
INSERT INTO otel.stock_traces (Timestamp, TraceId, SpanId, ParentSpanId, SpanName, SpanKind, ServiceName, ResourceAttributes, ScopeName,
  SpanAttributes, Duration, StatusCode)
SELECT Timestamp, TraceId, SpanId, ParentSpanId, SpanName, SpanKind, ServiceName, ResourceAttributes, ScopeName,
  mapConcat(SpanAttributes, CAST(if(notEmpty(ResponseTokenIds), [
    ('agentlightning.llm.prompt_token_ids', toJSONString(PromptTokenIds)),
    ('agentlightning.llm.response_token_ids', toJSONString(ResponseTokenIds)),
    ('agentlightning.llm.response_logprobs', toJSONString(ResponseLogprobs))], []), 'Map(LowCardinality(String), String)')),
  Duration, StatusCode
FROM otel.otel_traces
WHERE BatchId >= {first:UInt64} AND BatchId < {end:UInt64}

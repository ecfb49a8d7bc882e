-- What a read of whole rollouts costs is the bytes around the rows that it wants, a granule for each rollout. So what verdicts, calls and
-- rewards are made of stands in a small column of its own beside the map of all attributes (parts that were written before compute it from
-- that map); the columns that every such read needs are unpacked by LZ4, several times faster than ZSTD, and in blocks of about one granule.
ALTER TABLE otel.otel_traces ADD COLUMN IF NOT EXISTS Facts Map(LowCardinality(String), String) DEFAULT mapFilter((key, value) ->
  key IN ('agentlightning.process', 'agentlightning.attempt.hooked', 'agentlightning.seal.spans', 'agentlightning.seal.dropped',
    'agentlightning.llm.call', 'agentlightning.llm.choice', 'agentlightning.llm.prefix_call', 'agentlightning.llm.prefix_choice',
    'agentlightning.llm.model_version', 'agentlightning.llm.incomplete', 'agentlightning.llm.retry_of', 'gen_ai.agent.name')
  OR startsWith(key, 'agentlightning.reward.'), SpanAttributes) CODEC(LZ4);

ALTER TABLE otel.otel_traces ADD COLUMN IF NOT EXISTS HasImages Bool
  DEFAULT multiSearchAny(SpanAttributes['gen_ai.input.messages'], ['"image', '"input_image', '"blob"', '"uri"']);

ALTER TABLE otel.otel_traces
  MODIFY COLUMN RolloutId CODEC(LZ4), MODIFY COLUMN AttemptId CODEC(LZ4), MODIFY COLUMN SequenceId CODEC(Delta(8), LZ4),
  MODIFY COLUMN TraceId CODEC(LZ4), MODIFY COLUMN SpanId CODEC(LZ4), MODIFY COLUMN ParentSpanId CODEC(LZ4),
  MODIFY COLUMN SpanName CODEC(LZ4), MODIFY COLUMN PromptTokenIds CODEC(T64, LZ4), MODIFY COLUMN ResponseTokenIds CODEC(T64, LZ4),
  MODIFY COLUMN ResponseLogprobs CODEC(LZ4);

ALTER TABLE otel.otel_traces MODIFY SETTING min_compress_block_size = 16384;

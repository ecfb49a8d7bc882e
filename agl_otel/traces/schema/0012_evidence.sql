-- Facts also hold what a verdict needs to know of processes: which spans came late, which seals are a process's last, and whose call it was.
ALTER TABLE otel.otel_traces MODIFY COLUMN Facts Map(LowCardinality(String), String) DEFAULT mapFilter((key, value) ->
  key IN ('agentlightning.process', 'agentlightning.late', 'agentlightning.attempt.hooked', 'agentlightning.seal.spans',
    'agentlightning.seal.dropped', 'agentlightning.seal.closing', 'agentlightning.llm.caller',
    'agentlightning.llm.call', 'agentlightning.llm.choice', 'agentlightning.llm.prefix_call', 'agentlightning.llm.prefix_choice',
    'agentlightning.llm.model_version', 'agentlightning.llm.incomplete', 'agentlightning.llm.retry_of', 'gen_ai.agent.name',
    'agent.name', 'traceloop.association.properties.langgraph_node', 'traceloop.association.properties.ls_integration',
    'gen_ai.response.finish_reasons', 'gen_ai.request.temperature', 'gen_ai.request.top_p')
  OR startsWith(key, 'agentlightning.reward.'), SpanAttributes) CODEC(LZ4);

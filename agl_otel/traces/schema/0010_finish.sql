-- Facts also hold why a reply ended: replies cut at the limit of their length are counted beside the rewards they came to. And what it was
-- sampled at: a temperature or top_p of the agent's own is another distribution than the one that training computes with.
ALTER TABLE otel.otel_traces MODIFY COLUMN Facts Map(LowCardinality(String), String) DEFAULT mapFilter((key, value) ->
  key IN ('agentlightning.process', 'agentlightning.attempt.hooked', 'agentlightning.seal.spans', 'agentlightning.seal.dropped',
    'agentlightning.llm.call', 'agentlightning.llm.choice', 'agentlightning.llm.prefix_call', 'agentlightning.llm.prefix_choice',
    'agentlightning.llm.model_version', 'agentlightning.llm.incomplete', 'agentlightning.llm.retry_of', 'gen_ai.agent.name',
    'agent.name', 'traceloop.association.properties.langgraph_node', 'traceloop.association.properties.ls_integration',
    'gen_ai.response.finish_reasons', 'gen_ai.request.temperature', 'gen_ai.request.top_p')
  OR startsWith(key, 'agentlightning.reward.'), SpanAttributes) CODEC(LZ4);

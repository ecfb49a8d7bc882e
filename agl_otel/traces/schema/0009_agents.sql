-- Facts also hold by what else than the conventions' `gen_ai.agent.name` an agent is known: OpenInference and our LangChain handler say
-- `agent.name`; a node of a LangGraph graph is named on the span of its task (`langgraph` in ls_integration: no inner node of create_agent).
ALTER TABLE otel.otel_traces MODIFY COLUMN Facts Map(LowCardinality(String), String) DEFAULT mapFilter((key, value) ->
  key IN ('agentlightning.process', 'agentlightning.attempt.hooked', 'agentlightning.seal.spans', 'agentlightning.seal.dropped',
    'agentlightning.llm.call', 'agentlightning.llm.choice', 'agentlightning.llm.prefix_call', 'agentlightning.llm.prefix_choice',
    'agentlightning.llm.model_version', 'agentlightning.llm.incomplete', 'agentlightning.llm.retry_of', 'gen_ai.agent.name',
    'agent.name', 'traceloop.association.properties.langgraph_node', 'traceloop.association.properties.ls_integration')
  OR startsWith(key, 'agentlightning.reward.'), SpanAttributes) CODEC(LZ4);

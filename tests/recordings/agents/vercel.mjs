// The Vercel AI SDK with its own telemetry.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { InMemorySpanExporter, SimpleSpanProcessor } from '@opentelemetry/sdk-trace-base';
import { NodeTracerProvider } from '@opentelemetry/sdk-trace-node';
import { generateText, stepCountIs, tool } from 'ai';
import fs from 'node:fs';
import { z } from 'zod';

const exporter = new InMemorySpanExporter();
const provider = new NodeTracerProvider({ spanProcessors: [new SimpleSpanProcessor(exporter)] });
provider.register(); // spans find their parents
const upstream = createOpenAICompatible({ name: 'vllm', baseURL: process.env.OPENAI_BASE_URL, apiKey: 'none' });
const telemetry = { isEnabled: true, tracer: provider.getTracer('ai'), functionId: 'weather_agent' };
await generateText({
  model: upstream('m'),
  system: 'Use the tool.',
  prompt: 'What is the weather in Rome?',
  tools: {
    get_weather: tool({ description: 'The weather of a city.', inputSchema: z.object({ city: z.string() }), execute: async () => 'sunny' }),
  },
  stopWhen: stepCountIs(3),
  experimental_telemetry: telemetry,
  telemetry,
});
await provider.forceFlush();
const seconds = ([s, n]) => s + n / 1e9;
const kinds = ['Internal', 'Server', 'Client', 'Producer', 'Consumer'];
const spans = exporter.getFinishedSpans().sort((a, b) => seconds(a.startTime) - seconds(b.startTime)).map((s, i) => ({
  rollout_id: 'ro-1', attempt_id: 'at-1', sequence_id: i + 1,
  trace_id: s.spanContext().traceId, span_id: s.spanContext().spanId, parent_id: s.parentSpanContext?.spanId ?? null,
  name: s.name, kind: kinds[s.kind], attributes: s.attributes, events: [],
  start_time: seconds(s.startTime), end_time: seconds(s.endTime), scope: { name: s.instrumentationScope.name, version: '' },
}));
const version = (name) => JSON.parse(fs.readFileSync(`node_modules/${name}/package.json`)).version;
const versions = { ai: version('ai'), '@ai-sdk/openai-compatible': version('@ai-sdk/openai-compatible') };
fs.writeFileSync(process.env.RECORDING, JSON.stringify({ versions, spans, logs: [] }, null, 1) + '\n');

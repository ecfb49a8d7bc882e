"""litellm's OpenTelemetry callback, with the provider that keeps vLLM's token ids."""

import os
import time

import keep
import litellm
from litellm.integrations.opentelemetry import OpenTelemetry, OpenTelemetryConfig
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

keep.start()


class Sink(SpanExporter):
    """Hands on to the exporter that keeps."""

    def export(self, spans):
        """Keep them."""
        return keep._spans.export(spans) or SpanExportResult.SUCCESS


litellm.callbacks = [OpenTelemetry(config=OpenTelemetryConfig(exporter=Sink()))]
url = os.environ["OPENAI_BASE_URL"]
messages = [{"role": "system", "content": keep.SYSTEM}, {"role": "user", "content": keep.QUESTION}]
litellm.completion(model="hosted_vllm/m", messages=messages, api_base=url, api_key="none", logprobs=True)
litellm.completion(model="hosted_vllm/m", messages=messages, api_base=url, api_key="none", tools=[keep.TOOL])
deadline = time.monotonic() + 20  # its callbacks run in threads of their own
while len(keep._spans.get_finished_spans()) < 4 and time.monotonic() < deadline:
    time.sleep(0.1)
keep.write("litellm")

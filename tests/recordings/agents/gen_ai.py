"""OpenTelemetry's own instrumentation of the OpenAI SDK; a variable chooses between events and messages on the span."""

import keep
from openai import OpenAI
from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

keep.start()
OpenAIInstrumentor().instrument()
keep.by_hand(OpenAI())
keep.write("openai", "opentelemetry-instrumentation-openai-v2")

"""OpenLLMetry's instrumentation of the OpenAI SDK."""

import keep
from openai import OpenAI
from opentelemetry.instrumentation.openai import OpenAIInstrumentor

keep.start()
OpenAIInstrumentor().instrument()
keep.by_hand(OpenAI())
keep.write("openai", "opentelemetry-instrumentation-openai")

"""OpenInference (Arize Phoenix) on the OpenAI SDK."""

import keep
from openai import OpenAI
from openinference.instrumentation.openai import OpenAIInstrumentor

keep.start()
OpenAIInstrumentor().instrument()
keep.by_hand(OpenAI())
keep.write("openai", "openinference-instrumentation-openai")

"""LangSmith's wrapper of the OpenAI SDK, exporting by OpenTelemetry."""

import keep
from openai import OpenAI

provider = keep.start()
from langsmith import Client, traceable  # noqa: E402  # it takes the provider that is there
from langsmith.wrappers import wrap_openai  # noqa: E402 - as above

client = Client(otel_enabled=True)


@traceable(name="weather_agent", client=client)
def agent():
    """A chain around the calls."""
    keep.by_hand(wrap_openai(OpenAI(), tracing_extra={"client": client}))


agent()
client.flush()
provider.force_flush()
keep.write("openai", "langsmith")

"""openai-agents with chat completions, under whichever instrumentation is installed."""

import keep
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

keep.start()
try:
    from opentelemetry.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    installed = "opentelemetry-instrumentation-openai-agents"
except ImportError:
    from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    installed = "openinference-instrumentation-openai-agents"
OpenAIAgentsInstrumentor().instrument()


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


model = OpenAIChatCompletionsModel("m", AsyncOpenAI())
Runner.run_sync(Agent("weather_agent", instructions=keep.SYSTEM, model=model, tools=[get_weather]), keep.QUESTION)
keep.write("openai-agents", installed)

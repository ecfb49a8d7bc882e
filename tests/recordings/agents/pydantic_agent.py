"""pydantic-ai's own instrumentation."""

import keep
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

keep.start()
Agent.instrument_all()
agent = Agent(OpenAIChatModel("m"), instructions=keep.SYSTEM, name="weather_agent")


@agent.tool_plain
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


agent.run_sync(keep.QUESTION)
keep.write("pydantic-ai-slim")

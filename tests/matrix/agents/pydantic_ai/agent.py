"""pydantic-ai with its own instrumentation: chat completions and responses, run, sync and streamed."""

import asyncio
import pathlib
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "shared"))
from population import population

Agent.instrument_all()


def agent(model=OpenAIChatModel):
    return Agent(model("gpt-4.1"), instructions="Answer questions about cities.", name="city_agent", tools=[population])


def sync(question):
    return agent().run_sync(question).output


async def in_async(question):
    return (await agent().run(question)).output


async def stream(question):
    async with agent().run_stream(question) as result:
        return await result.get_output()


async def responses(question):
    return (await agent(OpenAIResponsesModel).run(question)).output


if __name__ == "__main__":
    run = {"sync": sync, "async": in_async, "stream": stream, "responses": responses}
    answer = run[sys.argv[1]](sys.argv[2])
    print(asyncio.run(answer) if asyncio.iscoroutine(answer) else answer)

"""Microsoft Agent Framework: chat completions and responses, run and streamed; its own spans (ENABLE_INSTRUMENTATION)."""

import asyncio
import pathlib
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "shared"))
from population import population

CLIENTS = {"chat": OpenAIChatCompletionClient, "chat-stream": OpenAIChatCompletionClient, "responses": OpenAIChatClient}


async def main(mode, question):
    agent = Agent(CLIENTS[mode](model="gpt-4.1"), "Answer questions about cities.", name="city_agent", tools=[population])
    if mode != "chat-stream":
        return (await agent.run(question)).text
    text = ""
    async for update in agent.run(question, stream=True):
        text = text + update.text if update.text else text
    return text


if __name__ == "__main__":
    print(asyncio.run(main(*sys.argv[1:])))

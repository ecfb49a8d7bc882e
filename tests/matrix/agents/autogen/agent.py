"""AutoGen AgentChat: one assistant, run and streamed."""

import asyncio
import pathlib
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "shared"))
from population import population


async def main(mode, question):
    client = OpenAIChatCompletionClient(model="gpt-4.1")
    agent = AssistantAgent(
        "city_agent",
        client,
        tools=[population],
        system_message="Answer questions about cities.",
        max_tool_iterations=5,
        model_client_stream=mode == "stream",
    )
    result = await agent.run(task=question)
    await client.close()
    return result.messages[-1].content


if __name__ == "__main__":
    print(asyncio.run(main(*sys.argv[1:])))

"""An agent of the OpenAI Agents SDK that answers from a handbook through a retriever behind MCP over HTTP.

OPENAI_BASE_URL=… OPENAI_API_KEY=… RETRIEVER_URL=http://127.0.0.1:8091/mcp python agent.py "When does the canteen open?"
"""

import asyncio
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner
from agents.mcp import MCPServerStreamableHttp
from openai import AsyncOpenAI

RETRIEVER = {"url": os.environ.get("RETRIEVER_URL", "http://127.0.0.1:8091/mcp")}
INSTRUCTIONS = "Answer from the handbook, which you read with `retrieve`. Reply with the answer alone, as short as it can be."


async def solve(question: str) -> str:
    model = OpenAIChatCompletionsModel(os.environ.get("OPENAI_MODEL", "policy"), AsyncOpenAI())
    async with MCPServerStreamableHttp(RETRIEVER, client_session_timeout_seconds=60) as retriever:
        agent = Agent("librarian", instructions=INSTRUCTIONS, model=model, mcp_servers=[retriever])
        return (await Runner.run(agent, question)).final_output


if __name__ == "__main__":
    print(asyncio.run(solve(sys.argv[1])))

"""openai-agents: responses (its default), chat completions, streamed, with a handed-over tool and with one of an MCP server over stdio."""

import asyncio
import pathlib
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "shared"))
from population import population

SERVER = str(pathlib.Path(__file__).parent.parent / "shared" / "mcp_server.py")
SYSTEM = "Answer questions about cities."


def chat_model():
    return OpenAIChatCompletionsModel("gpt-4.1", AsyncOpenAI())


def agent(model="gpt-4.1", **more):
    return Agent("city_agent", instructions=SYSTEM, model=model, **({"tools": [function_tool(population)]} | more))


async def chat(question):
    return (await Runner.run(agent(chat_model()), question)).final_output


async def chat_stream(question):
    result = Runner.run_streamed(agent(chat_model()), question)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def responses(question):
    return (await Runner.run(agent(), question)).final_output


async def responses_stream(question):
    result = Runner.run_streamed(agent(), question)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def mcp(question):
    async with MCPServerStdio({"command": sys.executable, "args": [SERVER]}, client_session_timeout_seconds=60) as server:
        return (await Runner.run(agent(chat_model(), tools=[], mcp_servers=[server]), question)).final_output


if __name__ == "__main__":
    print(asyncio.run(globals()[sys.argv[1].replace("-", "_")](sys.argv[2])))

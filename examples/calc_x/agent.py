"""An agent of the OpenAI Agents SDK that uses a calculator behind MCP. It contains no code for training.

OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python agent.py "Tom has 3 boxes of 12 pens. How many pens?"
"""

import asyncio
import os
import pathlib
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI

CALCULATOR = {"command": sys.executable, "args": [str(pathlib.Path(__file__).parent / "calculator.py")]}
INSTRUCTIONS = "Solve the problem. Use the calculator for every sum. End with a line `Answer: ` and the number alone."


async def solve(question: str) -> str:
    model = OpenAIChatCompletionsModel(os.environ.get("OPENAI_MODEL", "policy"), AsyncOpenAI())
    async with MCPServerStdio(CALCULATOR, client_session_timeout_seconds=60) as calculator:
        agent = Agent("calc", instructions=INSTRUCTIONS, model=model, mcp_servers=[calculator])
        return (await Runner.run(agent, question)).final_output


if __name__ == "__main__":
    print(asyncio.run(solve(sys.argv[1])))

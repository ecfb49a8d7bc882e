"""LlamaIndex: a function agent, and one that reasons in text (ReAct)."""

import asyncio
import os
import pathlib
import sys

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.llms.openai import OpenAI, OpenAIResponses

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "shared"))
from population import population

KINDS = {"function": FunctionAgent, "function-whole": FunctionAgent, "react": ReActAgent, "responses": FunctionAgent}


async def main(mode, question):
    model = (OpenAIResponses if mode == "responses" else OpenAI)("gpt-4.1", api_base=os.environ["OPENAI_BASE_URL"])
    agent = KINDS[mode](
        name="city_agent", system_prompt="Answer questions about cities.", tools=[population], llm=model, streaming=mode != "function-whole"
    )
    return str(await agent.run(question))


if __name__ == "__main__":
    print(asyncio.run(main(*sys.argv[1:])))

"""smolagents: tools called by name, or by code that the model writes."""

import os
import pathlib
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "shared"))
from population import population

KINDS = {"tools": ToolCallingAgent, "tools-stream": ToolCallingAgent, "code": CodeAgent, "code-stream": CodeAgent}

if __name__ == "__main__":
    mode, question = sys.argv[1:]
    model = OpenAIServerModel("gpt-4.1", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = KINDS[mode](tools=[tool(population)], model=model, verbosity_level=0, stream_outputs=mode.endswith("-stream"))
    print(agent.run(question))

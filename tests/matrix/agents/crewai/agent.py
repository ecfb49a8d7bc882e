"""CrewAI: a crew of one."""

import pathlib
import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "shared"))
from population import population


def run(mode, question):
    model = LLM(model="openai/gpt-4.1", stream=mode == "stream")
    agent = Agent(
        role="city expert", goal="Answer questions about cities", backstory="You know cities.", tools=[tool(population)], llm=model
    )
    task = Task(description=question, expected_output="a number", agent=agent)
    return Crew(agents=[agent], tasks=[task], verbose=False).kickoff()


if __name__ == "__main__":
    print(run(*sys.argv[1:]))

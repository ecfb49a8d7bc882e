"""Tools of LangChain and of OpenAI's Agents SDK that are answered from a stored attempt, in an environment with both."""

from __future__ import annotations

import json
import subprocess
import sysconfig

import pytest

from tests.environments import ROOT, AbsentError, installed

pytestmark = pytest.mark.full
PACKAGES = ("langchain-core==1.7.2", "openai-agents==0.24.0")
SCRIPT = """
import asyncio, json, sys
sys.path += sys.argv[1:]
from agents import function_tool
from langchain_core.tools import BaseTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from agl_otel.adapters.replay import Recorded, ToolCall
from agl_otel.adapters.replayed import replayed

def look_up(number: int, deep: bool = False) -> str:
    "Look a number up."
    sys.exit("the tool was called")

class Own(BaseTool):
    name: str = "look_up"
    description: str = "Look a number up."
    def _run(self, number: int, deep: bool = False) -> str:
        sys.exit("the tool was called")

arguments = {"number": 3}
call = {"type": "tool_call", "id": "c", "name": "look_up", "args": arguments}
said = []
for given in (tool(look_up), Own()):
    recorded = Recorded({ToolCall.of("look_up", arguments): ["found 3"]})
    made = replayed(given, recorded)
    said.append([made.invoke(call).content, asyncio.run(made.ainvoke(call)).content, recorded.misses.total(),
                 convert_to_openai_tool(made) == convert_to_openai_tool(given)])
given = function_tool(look_up)
recorded = Recorded({ToolCall.of("look_up", arguments): ["found 3"]})
made = replayed(given, recorded)
said.append([*(asyncio.run(made.on_invoke_tool(None, json.dumps(arguments))) for _ in range(2)), recorded.misses.total(),
             (made.name, made.description, made.params_json_schema) == (given.name, given.description, given.params_json_schema)])
print(json.dumps(said))
"""


def test_a_tool_has_the_same_schema_and_recorded_answers_and_is_never_called() -> None:
    try:
        place = installed("replayed-tools", PACKAGES)
    except AbsentError as error:
        pytest.skip(str(error))
    behind = (str(ROOT), str(ROOT / "hook"), sysconfig.get_path("purelib"))
    done = subprocess.run([str(place / "bin" / "python"), "-c", SCRIPT, *behind], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["found 3", 'look_up({"number": 3}) was not recorded: a replay calls no tool', 1, True]] * 3

"""What the scripted model says, and the tokens it says it in. Pure.

The riddle, which all frameworks are played with: "How many people live in A1 and B1 together?", a tool that knows one city, two calls of
it, one answer. The names of the cities are the rollout's own, so every prompt says whose it is, whatever the telemetry claims.

Tokens: a chat template over code points. A reply that the agent sends back as it was sampled starts the next prompt token for token;
how the arguments of a tool call are spelled is not part of it, as in the templates of real models, which print them from the parsed value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

TOOL: Final = "population"
FINAL_TOOL: Final = "final_answer"
"""The tool by which some frameworks have the model end (smolagents)."""
MAX_TURNS: Final = 6
"""A conversation in which the tool does not answer ends here."""
_ROLES: Final = {"system": 1, "developer": 1, "user": 2, "assistant": 3, "tool": 4}
_END, _CALL, _ARGUMENTS, _TOOLS = 5, 6, 7, 8
_FIRST_CHARACTER: Final = 16
_CITIES: Final = re.compile(r"people live in (\w+) and (\w+) together")
_KNOWN: Final = re.compile(r"\b(\w+) has (\d+) people")


Task = Literal["tool", "told", "files", "sub_agent", "compaction"]
"""`tool`: the agent has the tool; `told`: the question has the facts; the others: files in the agent's folder have them."""
_BY_ANOTHER: Final = "Have a sub-agent answer this. "
_TEXTS: Final[dict[Task, str]] = {
    "tool": "{0}",
    "told": "{1} has {3} people. {2} has {4} people. {0}",
    "files": "The files {1}.txt and {2}.txt tell. {0}",
    "sub_agent": _BY_ANOTHER + "The files {1}.txt and {2}.txt tell. {0}",
    "compaction": "The files {1}.txt and {2}.txt tell. {0}",
}


def question(first: str, second: str, task: Task = "tool") -> str:
    """The riddle about two cities."""
    asked = f"How many people live in {first} and {second} together?"
    return _TEXTS[task].format(asked, first, second, people(first), people(second))


def people(city: str) -> int:
    """What the tool knows: agents/shared/population.py says the same."""
    return sum(map(ord, city)) * 10


@dataclass(frozen=True)
class ToolCall:
    """A call that the model makes."""

    id: str
    name: str
    arguments: str
    """JSON, in the spelling of the template."""


@dataclass(frozen=True)
class Message:
    """A message of any protocol."""

    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Request:
    """What is asked, of any protocol."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    """Their names."""

    @property
    def cities(self) -> tuple[str, str] | None:
        """The cities of the first question in it, or else of a reply that stands for it (a summary); None where there is none."""
        for message in (*(each for each in self.messages if each.role != "assistant"), *self.messages):
            if found := _CITIES.findall(message.text):
                return found[-1]
        return None


@dataclass(frozen=True)
class Sampled:
    """A reply and its tokens."""

    reply: Message
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]


Reply = Callable[[Request, str], Message]
"""(what is asked, id for a tool call) → what is said."""


def spelled(arguments: Any) -> str:
    """Arguments of a tool call, parsed or not, in the spelling of the template."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return arguments
    return json.dumps(arguments, sort_keys=True)


def sample(request: Request, number: int, reply: Reply) -> Sampled:
    """Answer `request`, the server's `number`-th, with what `reply` says."""
    said = reply(request, f"call_{number}")
    prompt = [_TOOLS, *_characters(",".join(request.tools))] if request.tools else []
    for message in request.messages:
        prompt += [_ROLES.get(message.role, 2), *_said(message)]
    response = _said(said)
    return Sampled(said, [*prompt, _ROLES["assistant"]], response, [-(1 + (number + place) % 9) / 8 for place in range(len(response))])


def _said(message: Message) -> list[int]:
    ids = _characters(message.text)
    for call in message.calls:
        ids += [_CALL, *_characters(call.name), _ARGUMENTS, *_characters(spelled(call.arguments))]
    return [*ids, _END]


def _characters(text: str) -> list[int]:
    return [ord(character) + _FIRST_CHARACTER for character in text]


_SUB_AGENTS_END: Final = "complete_task"
"""The tool by which a sub-agent of Gemini CLI ends."""
_SUBMIT: Final = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""By this command mini-swe-agent has the model end."""
_SUMMARIES: Final = {
    "a <summary> block": "summary",  # Claude Code
    "CONTEXT CHECKPOINT COMPACTION": "summary",  # Codex
    "<state_snapshot> XML": "state_snapshot",  # Qwen Code
    "<template>": "summary",  # opencode
}
"""{what a harness has in the message that asks for a summary of the conversation: the tag of the summary}."""
_SHELLS: Final[dict[str, Callable[[str], dict[str, Any]]]] = {
    **dict.fromkeys(("bash", "Bash"), lambda command: {"command": command, "description": "Look it up"}),
    # Qwen Code loses the output of a command that ends at once, at times.
    "run_shell_command": lambda command: {"command": f"{command} && sleep 0.5", "description": "Look it up"},
    "exec_command": lambda command: {"cmd": command},
}
"""{tool by which a harness runs commands: the arguments for a command}."""
_DELEGATES: Final[dict[str, Callable[[str], dict[str, Any]]]] = {
    "Agent": lambda prompt: {"description": "Look it up", "prompt": prompt, "subagent_type": "general-purpose"},
    "Task": lambda prompt: {"description": "Look it up", "prompt": prompt, "subagent_type": "general-purpose"},
    "agent": lambda prompt: {
        "description": "Look it up",
        "prompt": prompt,
        "subagent_type": "general-purpose",
        "run_in_background": False,
    },
    "invoke_agent": lambda prompt: {"agent_name": "generalist", "prompt": prompt},
    "task": lambda prompt: {"description": "Look it up", "prompt": prompt, "subagent_type": "general"},
}
"""{tool by which a harness starts a sub-agent: the arguments for a task}."""


def riddle(request: Request, call_id: str) -> Message:
    """What the model of the riddle says next."""
    cities = request.cities
    known = dict(found for message in request.messages for found in _KNOWN.findall(message.text))
    if cities is None:
        return Message("assistant", "I know only about cities.")
    tag = next((tag for mark, tag in _SUMMARIES.items() if mark in request.messages[-1].text), None)
    if tag is not None:
        facts = " ".join(f"{city} has {count} people." for city, count in known.items())
        return Message("assistant", f"<{tag}>{question(*cities)} {facts}</{tag}>")
    turns = sum(message.role == "assistant" for message in request.messages)
    by_another = next((name for name in request.tools if name in _DELEGATES), None)
    if (
        by_another
        and not any(message.role == "tool" for message in request.messages)
        and any(_BY_ANOTHER in message.text for message in request.messages)
    ):
        task = question(*cities, "files")
        return calling(by_another, _DELEGATES[by_another](task), call_id)
    unknown = [city for city in cities if city not in known]
    if not unknown:
        return _last(request, str(sum(int(known[city]) for city in cities)), call_id)
    return _last(request, "I cannot find out.", call_id) if turns >= MAX_TURNS else _ask(request, unknown[0], call_id)


def _last(request: Request, answer: str, call_id: str) -> Message:
    if FINAL_TOOL in request.tools:
        return calling(FINAL_TOOL, {"answer": answer}, call_id)
    if _SUB_AGENTS_END in request.tools:
        return calling(_SUB_AGENTS_END, {"result": {"response": answer}}, call_id)
    if _marked(request, _SUBMIT) and "bash" in request.tools:
        return calling("bash", {"command": f"{_SUBMIT} && echo {answer}"}, call_id)
    return Message("assistant", next((said.format(answer) for mark, _, said in _STYLES if _marked(request, mark)), answer))


def _ask(request: Request, city: str, call_id: str) -> Message:
    tool = next((name for name in request.tools if name.endswith(TOOL)), None)
    if tool is not None:
        return calling(tool, {"city": city}, call_id)
    shell = next((name for name in request.tools if name in _SHELLS), None)
    if shell is not None:
        return calling(shell, _SHELLS[shell](f"cat {city}.txt"), call_id)
    return Message("assistant", next((asked.format(city) for mark, asked, _ in _STYLES if _marked(request, mark)), "I have no tool."))


_STYLES: Final = (
    ("<code>", 'Thought: I look it up.\n<code>\nprint(population("{}"))\n</code>', 'Thought: done.\n<code>\nfinal_answer("{}")\n</code>'),
    ("Action Input:", 'Thought: I look it up.\nAction: population\nAction Input: {{"city": "{}"}}', "Thought: done.\nFinal Answer: {}"),
)
"""How a framework that hands over no tools asks for calls of them: (what its instructions hold, a call, the answer)."""


def _marked(request: Request, mark: str) -> bool:
    return any(mark in message.text for message in request.messages if message.role != "assistant")


def calling(name: str, arguments: dict[str, Any], call_id: str) -> Message:
    """A message that calls a tool."""
    return Message("assistant", calls=(ToolCall(call_id, name, spelled(arguments)),))


def pieces(text: str, count: int = 3) -> Sequence[str]:
    """`text` in at most `count` pieces, as a stream has it."""
    step = max(1, -(-len(text) // count))
    return [text[at : at + step] for at in range(0, len(text), step)]

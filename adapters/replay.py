"""Answers tools from a stored attempt, and compares the tool calls of a model with those that were recorded. Pure.

A replay calls no tool: one that was not recorded is a miss. It is a regression check, never an estimate: once a call differs, nobody knows
what the tools would have returned.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from agl_otel.adapters.chats import CHAT_REFUSALS
from agl_otel.adapters.messages import whole_calls
from agl_otel.adapters.texts import SHORTENED, canonical, is_masked
from agl_otel.spans.conversations import text_of
from agl_otel.spans.dialects.dialect import Message, as_text, loads
from agl_otel.types import Span
from agl_otel.types.columns import AttemptKey
from agl_otel.types.sampling import Contract
from agl_otel_hook import conventions

TOOL_SPANS: Final = (
    ("gen_ai.tool.name", "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"),
    ("tool.name", "input.value", "output.value"),
)
"""Attributes with name, arguments and result of a tool that was executed: OpenTelemetry's, OpenInference's."""
NOT_REPLAYED: Final = {
    **CHAT_REFUSALS,
    "no_prompt": "no prompt was captured with the call",
    "masked": "a masking rule replaced a text of its prompt or of its tool calls",
    "several_choices": "it asked for several replies: which one the agent used is not known",
}
"""Reasons for which a model call is not replayed."""
Fate = Literal["hit", "elsewhere", "miss", "not_made"]
FATES: Final[Mapping[Fate, str]] = {
    "hit": "as recorded",
    "elsewhere": "recorded at another call of the attempt",
    "miss": "not recorded",
    "not_made": "recorded, and not made",
}
"""What becomes of a tool call."""


class ToolCall(NamedTuple):
    """A call of a tool; two with equal fields are the same."""

    name: str
    arguments: str
    """JSON with sorted keys; another text as it is."""

    @classmethod
    def of(cls, name: Any, arguments: Any) -> ToolCall:
        """Return the call; no arguments are {}."""
        return cls(str(name or ""), canonical(as_text(arguments) if arguments not in (None, "") else "{}"))

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"


def calls_in(message: Message) -> list[ToolCall]:
    """Return the tool calls of an assistant's message in OpenAI's form. Raises an error of tolerant.MALFORMED if it has another."""
    return [ToolCall.of(each["function"]["name"], each["function"].get("arguments")) for each in message.get("tool_calls") or ()]


class Miss(NamedTuple):
    """Stands for the result of a tool call that was not recorded, or less often."""

    call: ToolCall

    def __str__(self) -> str:
        return f"{self.call} was not recorded: a replay calls no tool"


class Recorded:
    """The results of an attempt's tools. `answer` gives them in the order in which equal calls got them."""

    def __init__(self, results: Mapping[ToolCall, Sequence[str]]) -> None:
        self.results = results
        self.misses = Counter[ToolCall]()
        """What `answer` was asked for in vain."""
        self._given = Counter[ToolCall]()

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Recorded:
        """Read the results from the messages of an attempt's model calls, as the model read them; where these have fewer, from the spans
        of its tools. Examples in a prompt, which no model call of the attempt made, do not count."""
        whole = [found for _, found in whole_calls(spans, Counter())]
        made = {call for found in whole for reply in found.reply for call in calls_in(reply)}
        by_id: dict[tuple[ToolCall, str], list[str]] = {}
        for found in whole:
            for key, own in _results_in(found.prompt).items():
                if key[0] in made and len(own) > len(by_id.get(key, ())):  # later prompts repeat what is in earlier ones
                    by_id[key] = own
        results = defaultdict[ToolCall, list[str]](list)
        for (call, _), own in by_id.items():
            results[call] += own
        for call, own in _of_tools(spans).items():
            results[call] = max(results[call], own, key=len)
        return cls(dict(results))

    def answer(self, name: str, arguments: Any) -> str | Miss:
        """Return what this tool call returned, the first time what it returned first, or a Miss, which is counted."""
        call = ToolCall.of(name, arguments)
        known = self.results.get(call, ())
        if self._given[call] < len(known):
            self._given[call] += 1
            return known[self._given[call] - 1]
        self.misses[call] += 1
        return Miss(call)


def _results_in(messages: Sequence[Message]) -> dict[tuple[ToolCall, str], list[str]]:
    """Return the results of tools in a prompt by call and its id: a tool message belongs to the last call before it that has its id."""
    found, by_id = defaultdict[tuple[ToolCall, str], list[str]](list), dict[str, ToolCall]()
    for message in messages:
        ids = [str(each.get("id")) for each in message.get("tool_calls") or ()]
        by_id.update(zip(ids, calls_in(message), strict=True))
        call_id = str(message.get("tool_call_id"))
        if message["role"] == "tool" and (call := by_id.get(call_id)) is not None:
            found[call, call_id].append(text_of(message))
    return found


def _of_tools(spans: Sequence[Span]) -> dict[ToolCall, list[str]]:
    found = defaultdict[ToolCall, list[str]](list)
    for span in sorted(spans, key=lambda each: each.start_time or 0.0):
        for name, arguments, result in TOOL_SPANS:
            if name in span.attributes and result in span.attributes:
                given = span.attributes.get(arguments)
                call = ToolCall.of(span.attributes[name], loads(given) if isinstance(given, str) else given)
                found[call].append(as_text(span.attributes[result]))
                break
    return found


class Step(NamedTuple):
    """A model call to replay."""

    prompt: list[Message]
    tools: list[Message] | None
    forced: bool
    """Whether the agent required a tool call."""
    recorded: list[ToolCall]
    """What its reply called; empty: it was a text."""


def steps_of(spans: Sequence[Span], left_out: Counter[str], *, agent_match: str | None = None) -> list[Step]:
    """Return the model calls of an attempt that can be replayed, in order; count the others by NOT_REPLAYED."""
    steps: list[Step] = []
    for call, (prompt, reply, tools) in whole_calls(spans, left_out, agent_match=agent_match):
        if not prompt:
            left_out["no_prompt"] += 1
        elif len(reply) > 1:
            left_out["several_choices"] += 1
        elif SHORTENED.fullmatch(str(prompt[0].get("content"))):
            left_out["shortened"] += 1
        elif any(is_masked(text) for message in (*prompt, *reply) for text in _texts_in(message)):
            left_out["masked"] += 1
        else:
            contracts = (Contract.loads(str((each.span.attributes or {}).get(conventions.LLM_SAMPLING, ""))) for each in call.calls)
            forced = any(each is not None and each.agent.get("tool_choice") == "required" for each in contracts)
            steps.append(Step(prompt, tools, forced, calls_in(reply[0])))
    return steps


def _texts_in(message: Message) -> Iterator[str]:
    content = message.get("content")
    yield from (str(part.get("text")) for part in content) if isinstance(content, list) else (str(content),)
    yield from (str(each["function"].get("arguments")) for each in message.get("tool_calls") or ())


def compared(recorded: Sequence[ToolCall], made: Sequence[ToolCall], attempt: Collection[ToolCall]) -> list[tuple[ToolCall, Fate]]:
    """Return what becomes of each tool call of a reply, then those that were recorded and not made.

    `attempt`: the tool calls of all replies of the attempt.
    """
    left, found = Counter(recorded), list[tuple[ToolCall, Fate]]()
    for call in made:
        if left[call]:
            left[call] -= 1
            found.append((call, "hit"))
        else:
            found.append((call, "elsewhere" if call in attempt else "miss"))
    return [*found, *((call, "not_made") for call in left.elements())]


@dataclass
class Tally:
    """What a replay found."""

    attempts: int = 0
    calls: int = 0
    """Model calls that were replayed."""
    compared: int = 0
    """Of these, those in which a tool was called, then or now."""
    differing: int = 0
    """Of the compared ones, those whose tool calls are others than the recorded ones, and those that the server refused."""
    text_instead: int = 0
    """Of the differing ones, those in which a text is in place of tool calls."""
    refused: int = 0
    """Model calls whose prompt the server refused."""
    refusal: str = ""
    """What it said to the first of them."""
    tools: dict[str, Counter[Fate]] = field(default_factory=dict[str, Counter[Fate]])
    misses: Counter[ToolCall] = field(default_factory=Counter[ToolCall])
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Model calls that were not replayed, by NOT_REPLAYED."""
    _digests: dict[AttemptKey, str] = field(default_factory=dict[AttemptKey, str])

    def add(self, key: AttemptKey, steps: Sequence[Step], made: Sequence[Sequence[ToolCall] | None]) -> None:
        """Count an attempt: what was called at each step; None: the server refused it."""
        attempt = {call for step in steps for call in step.recorded}
        self.attempts += 1
        self.calls += len(steps)
        rows = list[list[tuple[ToolCall, Fate]] | None]()
        for step, calls in zip(steps, made, strict=True):
            fates = compared(step.recorded, calls or (), attempt)
            rows.append(None if calls is None else fates)
            self.refused += calls is None
            self.compared += bool(fates) or calls is None
            self.differing += calls is None or any(fate != "hit" for _, fate in fates)
            self.text_instead += calls == [] and bool(step.recorded)
            for call, fate in fates:
                self.tools.setdefault(call.name, Counter())[fate] += 1
                if fate == "miss":
                    self.misses[call] += 1
        self._digests[key] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    @property
    def share(self) -> float:
        """The share of the compared model calls that differ; NaN where none was compared."""
        return self.differing / self.compared if self.compared else float("nan")

    @property
    def digest(self) -> str:
        """The SHA-256 of what became of every tool call, whatever the order in which attempts were replayed."""
        lines = (json.dumps([*key, digest]) for key, digest in sorted(self._digests.items()))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

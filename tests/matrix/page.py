"""docs/frameworks.md, written from results.json, which `make matrix` keeps: a line for each framework, protocol and outcome. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.matrix.check import Result
from tests.matrix.frameworks import FRAMEWORKS, Framework, Play
from tests.matrix.harnesses import HARNESSES, UNPLAYED

RESULTS: Final = Path(__file__).parent / "results.json"
PAGE: Final = Path(__file__).parents[2] / "docs" / "frameworks.md"
Json = dict[str, Any]
Cell = Callable[[Framework, Json, Sequence[Json]], str]
"""(framework, what is kept of it, plays that share a line) → its cell."""
_HEAD: Final = """<!-- Written by `make matrix`; do not edit. -->
# Frameworks

Results of unmodified agents of these frameworks, each in a separate environment with this package, on a stack with a runner,
`opentelemetry-instrument` and the proxy. `make matrix` repeats them (`make matrix ARGS="langgraph smolagents"` only some); the agents and
their requirements are in [tests/matrix/agents](../tests/matrix/agents).

Every agent answers a riddle in three model calls, of which the first two call a tool. The model is scripted. It serves chat completions
with token ids and log-probs, as vLLM does. Its Responses and Messages, protocols without such fields, also have `prompt_token_ids`,
`token_ids` and `logprobs` if the proxy requests them. Hosted models do not return them; vLLM's Responses have the ids in other fields, and
log-probs only beside a text ([model-servers.md](model-servers.md#vllm-and-sglang)).

- **instrumented by**: installed instrumentations besides `opentelemetry-instrumentation-httpx`; *itself*: it uses OpenTelemetry's API.
- **own spans**: spans of the agent's process, all with the right rollout and attempt; **joined**: model calls that are children of
  one of them (`traceparent` reached the proxy).
- **exact**: calls whose prompt ids, response ids and log-probs, as an algorithm gets them, equal the model's samples; the same holds
  for the trajectories.
- **trajectories**: per rollout; 1 means that all calls merged, because every prompt continued the previous call.
- **trainable**: calls that GRPO takes (`sampling_policy = "correct"`) at temperature 1; **refused by**: the fields of
  [sampling](training.md#sampling) for which it refuses the others. The scripted model says which fields it heeds (`agl-sampling`), as
  the vLLM of a run does: all but `strict` of tools, for which other servers need `strict_tools = "drop"`. Of a server that
  does not, fields are unknown that a protocol cannot name, as `min_p` in Messages, and its calls are refused by them.
- **verdict**: of every attempt. **as expected**: all of this, no span without ids or with those of another rollout, and a correct answer.

"""


_HARNESSES: Final = """
## Harnesses

Command-line agents as published, started without a terminal by the scripts in [tests/matrix/agents](../tests/matrix/agents), each in a
folder and a home of its own.

| mode | question |
|---|---|
| `told` | the question has what is needed to answer it |
| `files` | two files have it, which the agent reads by its own tools |
| `compaction` | the same, where the conversation is shortened because its context is too small, or by the tool's command for it |
| `sub_agent` | the same, by a sub-agent |

Calls that a tool makes by itself, as for a title or a summary, are counted. Each streams as it does by itself.

- **joined by**: how calls are joined to the tool's own spans: by `traceparent`, by the response id, or by time, if one span encloses
  one call and no other; `address`: there is no such span, and the call's address names its attempt.
- **compaction**, **sub-agents**: the reasons by which the calls after a compaction, or of a sub-agent, begin other trajectories.

"""


def recorded(framework: Framework, version: str, plays: Sequence[tuple[Play, Result]]) -> Json:
    """What is kept of a framework that was played."""
    return {
        "version": version,
        "plays": {play.mode: {"protocol": play.protocol, "task": play.task, **asdict(result)} for play, result in plays},
    }


def page(results: Mapping[str, Json]) -> str:
    """The page."""
    return (
        f"{_HEAD}{_table(_COLUMNS, FRAMEWORKS, results)}\n{_remarks(FRAMEWORKS)}"
        f"{_HARNESSES}{_table(_HARNESS_COLUMNS, HARNESSES, results)}"
        + "".join(_row([title, *[""] * (len(_HARNESS_COLUMNS) - 2), f"not played: {why}"]) + "\n" for title, why in UNPLAYED.items())
        + f"\n{_remarks(HARNESSES, '### ')}"
    )


def _table(columns: Mapping[str, Cell], frameworks: Sequence[Framework], results: Mapping[str, Json]) -> str:
    lines = [_row(list(columns)), "|" + "---|" * len(columns)]
    for framework in frameworks:
        lines += _lines(columns, framework, results.get(framework.name))
    return "\n".join(lines) + "\n"


def _remarks(frameworks: Sequence[Framework], more: str = "## ") -> str:
    remarks = [f"- **{framework.title}**: {framework.remark}" for framework in frameworks if framework.remark]
    return more + "Remarks\n\n" + "\n".join(remarks) + "\n" if remarks else ""


def _lines(columns: Mapping[str, Cell], framework: Framework, kept: Json | None) -> list[str]:
    """A line for each outcome; plays with the same one share it."""
    if kept is None or "failure" in kept:
        why = "not played" if kept is None else f"no: {_plain(kept['failure'])}"
        return [_row([framework.title, *[""] * (len(columns) - 2), why])]
    outcomes: dict[tuple[str, ...], list[Json]] = {}
    for mode, cells in kept["plays"].items():
        play = {"mode": mode, **cells}
        outcomes.setdefault(tuple(cell(framework, kept, [play]) for name, cell in columns.items() if name not in _SUMMED), []).append(play)
    return [_row([cell(framework, kept, plays) for cell in columns.values()]) for plays in outcomes.values()]


def _total(plays: Sequence[Json], name: str) -> int:
    return sum(play[name] for play in plays)


def _share(name: str) -> Cell:
    return lambda _, __, plays: f"{_total(plays, name)} of {_total(plays, 'calls')}"


def _joined(_: Framework, __: Json, plays: Sequence[Json]) -> str:
    return f"{sum(play['joined'].get('traceparent', 0) for play in plays)} of {_total(plays, 'calls')}"


def _joined_by(_: Framework, __: Json, plays: Sequence[Json]) -> str:
    return ", ".join(f"{how} ({_SURE[how]})" for how in sorted({how for play in plays for how in play["joined"]}))


def _trajectories(_: Framework, __: Json, plays: Sequence[Json]) -> str:
    counts = "–".join(str(count) for count in sorted({count for play in plays for count in play["trajectories"]}))
    return counts + "".join(f", {name}" for name in plays[0]["breaks"])


def _refused_by(_: Framework, __: Json, plays: Sequence[Json]) -> str:
    return ", ".join(f"`{name}`" for name in sorted({name for play in plays for name in play["untrainable"]}))


def _noticed(task: str, *reasons: str) -> Cell:
    """Whether what the task brings about is a reason by which a trajectory ends or another begins."""

    def cell(_: Framework, __: Json, plays: Sequence[Json]) -> str:
        found = sorted({name for play in plays if play["task"] == task for name in play["breaks"] if name in reasons})
        return ", ".join(found) or ("no" if any(play["task"] == task for play in plays) else "")

    return cell


def _as_expected(_: Framework, __: Json, plays: Sequence[Json]) -> str:
    problems = plays[0]["problems"]
    return "no: " + "; ".join(map(_plain, problems)) if problems else "yes"


_SURE: Final = {"traceparent": "certain", "response id": "certain", "time": "likely", "address": "the attempt only"}
_MODES: Final[Mapping[str, Cell]] = {
    "version": lambda _, kept, __: kept["version"],
    "instrumented by": lambda framework, _, __: framework.instrumented_by,
    "protocol": lambda _, __, plays: plays[0]["protocol"],
    "modes": lambda _, __, plays: ", ".join(f"`{play['mode']}`" for play in plays),
    "own spans": lambda _, __, plays: str(_total(plays, "own_spans")),
}
_TOKENS: Final[Mapping[str, Cell]] = {
    "exact": _share("exact"),
    "trainable": _share("trainable"),
    "refused by": _refused_by,
    "trajectories": _trajectories,
}
_ENDS: Final[Mapping[str, Cell]] = {
    "verdict": lambda _, __, plays: ", ".join(sorted(plays[0]["verdicts"])),
    "as expected": _as_expected,
}
_COLUMNS: Final[Mapping[str, Cell]] = {
    "framework": lambda framework, _, __: framework.title,
    **_MODES,
    "joined": _joined,
    **_TOKENS,
    **_ENDS,
}
_HARNESS_COLUMNS: Final[Mapping[str, Cell]] = {
    "harness": lambda framework, _, __: framework.title,
    **_MODES,
    "joined by": _joined_by,
    **_TOKENS,
    "compaction": _noticed("compaction", "compacted", "truncated"),
    "sub-agents": _noticed("sub_agent", "sub_agent"),
    **_ENDS,
}
_SUMMED: Final = frozenset({"modes", "own spans", "joined", "exact", "trainable"})
"""Columns that do not tell outcomes apart."""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def kept_results() -> dict[str, Json]:
    """What earlier runs have kept, by framework."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(name: str, record: Json) -> None:
    """Put a framework's record in results.json and write the page again."""
    results = {**kept_results(), name: record}
    in_order = {framework.name: results[framework.name] for framework in (*FRAMEWORKS, *HARNESSES) if framework.name in results}
    RESULTS.write_text(json.dumps(in_order, indent=1, sort_keys=False) + "\n")
    PAGE.write_text(page(in_order))

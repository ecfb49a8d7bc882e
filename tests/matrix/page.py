"""docs/frameworks.md, written from results.json, which `make matrix` keeps: a line for each framework, protocol and outcome. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.matrix.check import Result
from tests.matrix.frameworks import FRAMEWORKS, Framework, Play

RESULTS: Final = Path(__file__).parent / "results.json"
PAGE: Final = Path(__file__).parents[2] / "docs" / "frameworks.md"
Json = dict[str, Any]
_HEAD: Final = """<!-- Written by `make matrix`; do not edit. -->
# Frameworks

Results of unmodified agents of these frameworks, each in a separate environment with this package, on a stack with a runner,
`opentelemetry-instrument` and the proxy. `make matrix` repeats them (`make matrix ARGS="langgraph smolagents"` only some); the agents and
their requirements are in [tests/matrix/agents](../tests/matrix/agents).

Every agent answers a riddle in three model calls, of which the first two call a tool. The model is scripted. It serves chat completions
with token ids and log-probs, as vLLM does. Its Responses and Messages, protocols without such fields, also have `prompt_token_ids`,
`token_ids` and `logprobs` if the proxy requests them; hosted models do not return them.

- **instrumented by**: installed instrumentations besides `opentelemetry-instrumentation-httpx`; *itself*: it uses OpenTelemetry's API.
- **own spans**: spans of the agent's process, all with the right rollout and attempt; **joined**: model calls that are children of
  one of them (`traceparent` reached the proxy).
- **exact**: calls whose prompt ids, response ids and log-probs, as an algorithm gets them, equal the model's samples; the same holds
  for the trajectories.
- **trajectories**: per rollout; 1 means that all calls merged, because every prompt continued the previous call.
- **verdict**: of every attempt. **as expected**: all of this, no span without ids or with those of another rollout, and a correct answer.

"""


def recorded(framework: Framework, version: str, plays: Sequence[tuple[Play, Result]]) -> Json:
    """What is kept of a framework that was played."""
    return {"version": version, "plays": {play.mode: {"protocol": play.protocol, **asdict(result)} for play, result in plays}}


def page(results: Mapping[str, Json]) -> str:
    """The page."""
    lines = [
        "| framework | version | instrumented by | protocol | modes | own spans | joined | exact | trajectories | verdict | as expected |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for framework in FRAMEWORKS:
        lines += _lines(framework, results.get(framework.name))
    remarks = [f"- **{framework.title}**: {framework.remark}" for framework in FRAMEWORKS if framework.remark]
    return _HEAD + "\n".join(lines) + "\n" + ("\n## Remarks\n\n" + "\n".join(remarks) + "\n" if remarks else "")


def _lines(framework: Framework, kept: Json | None) -> list[str]:
    if kept is None:
        return [f"| {framework.title} | – | | | | | | | | | not played |"]
    head = [framework.title, kept.get("version", "–"), framework.instrumented_by]
    if "failure" in kept:
        return [_row([*head, "", "", "", "", "", "", "", f"no: {_plain(kept['failure'])}"])]
    outcomes: dict[tuple[str, ...], list[Json]] = {}
    for mode, cells in kept["plays"].items():
        shown = _outcome(cells)
        outcomes.setdefault(shown, []).append({"mode": mode, **cells})
    rows: list[str] = []
    for shown, plays in outcomes.items():
        modes = ", ".join(f"`{play['mode']}`" for play in plays)
        sums = [sum(play[name] for play in plays) for name in ("own_spans", "joined", "exact", "calls")]
        counts = [str(sums[0]), f"{sums[1]} of {sums[3]}", f"{sums[2]} of {sums[3]}"]
        rows.append(_row([*head, shown[0], modes, *counts, *shown[1:]]))
    return rows


def _outcome(cells: Json) -> tuple[str, ...]:
    """The cells by which plays are told apart."""
    trajectories = "–".join(str(count) for count in sorted(set(cells["trajectories"])))
    broken = "".join(f", {name}" for name in cells["breaks"])
    verdicts = ", ".join(sorted(cells["verdicts"]))
    return (
        cells["protocol"],
        trajectories + broken,
        verdicts,
        "no: " + "; ".join(map(_plain, cells["problems"])) if cells["problems"] else "yes",
    )


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
    in_order = {framework.name: results[framework.name] for framework in FRAMEWORKS if framework.name in results}
    RESULTS.write_text(json.dumps(in_order, indent=1, sort_keys=False) + "\n")
    PAGE.write_text(page(in_order))

"""What came of a play: the product's own columns and spans compared with what the model sampled. Pure.

Three witnesses that know nothing of each other: the cities in a prompt say whose call it is, the server's memory says which tokens it
sampled, and the product says what it would train on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agl_otel.adapters import to_trajectories, to_transitions
from agl_otel.types import Span
from agl_otel.types.columns import Traces
from agl_otel_hook import conventions
from tests.matrix.frameworks import Play
from tests.matrix.model import VERSION, Served
from tests.matrix.script import Sampled

OURS = frozenset({"agl-runner", "agl-proxy"})
"""`service.name` of processes that are no agent's."""
Cities = tuple[str, str]


@dataclass
class Result:
    """The cells of one play."""

    rollouts: int
    own_spans: int = 0
    """Of the agent's process, under its own rollout and attempt."""
    strays: int = 0
    """Of any process, without ids or under another's."""
    calls: int = 0
    """That the model answered."""
    exact: int = 0
    """Of them: trained on as they were sampled, ids and log-probs, in the right rollout."""
    joined: int = 0
    """Of them: below a span of the agent's own."""
    trajectories: list[int] = field(default_factory=list[int])
    """Of each rollout."""
    breaks: dict[str, int] = field(default_factory=dict[str, int])
    refused: dict[str, int] = field(default_factory=dict[str, int])
    verdicts: dict[str, int] = field(default_factory=dict[str, int])
    problems: list[str] = field(default_factory=list[str])
    """What differs from the expectation, in words; empty where all is well."""


def result(play: Play, asked: Mapping[str, Cities], traces: Traces, spans: Sequence[Span], served: Sequence[Served]) -> Result:
    """The cells of a play.

    Args:
        play: what is expected.
        asked: {rollout id: the cities of its question}.
        traces: of these rollouts.
        spans: of them, and those that have no ids.
        served: what the model answered meanwhile.
    """
    found = Result(len(asked), calls=len(served))
    own = {(span.trace_id, span.span_id) for span in spans if _is_agents(span)}
    found.own_spans = sum((span.trace_id, span.span_id) in own and _in_place(span, asked, traces) for span in spans)
    found.strays = sum(not _in_place(span, asked, traces) for span in spans)
    parents = {span.span_id: span.parent_id for span in spans if span.name == conventions.SPAN_LLM}
    span_ids = {span_id for _, span_id in own}
    found.joined = sum(parents.get(answer.span_id) in span_ids for answer in served)
    _tokens(found, asked, traces, served)
    found.verdicts = dict(Counter(verdict.kind for verdict in traces.verdicts.values()))
    found.problems = _problems(found, play, traces)
    return found


def _is_agents(span: Span) -> bool:
    return span.resource.attributes.get("service.name") not in OURS and span.name != conventions.SPAN_SEAL


def _in_place(span: Span, asked: Mapping[str, Cities], traces: Traces) -> bool:
    """Whether it has the ids of an attempt of these, and says nothing of another one's cities."""
    if (span.rollout_id, span.attempt_id) not in traces.verdicts:
        return False
    said = " ".join(value for value in span.attributes.values() if isinstance(value, str))
    return not any(city in said for rollout_id, cities in asked.items() if rollout_id != span.rollout_id for city in cities)


def _tokens(found: Result, asked: Mapping[str, Cities], traces: Traces, served: Sequence[Served]) -> None:
    """Every call by itself against the server's memory, then the merged trajectories against their calls."""
    memory = {answer.span_id: answer for answer in served}
    alone = to_transitions(traces)
    exact: dict[int, Sampled] = {}
    for place in range(len(alone)):
        row = int(alone.rows[place][0])
        answer = memory.get(traces.calls.span_id[row])
        if answer is None or answer.cities != asked.get(alone.rollout_id[place]) or alone.model_version[place] != VERSION:
            continue
        trained = (alone.prompt[place], alone.response[place], alone.logprobs[place])
        wanted = (answer.sampled.prompt_ids, answer.sampled.response_ids, np.array(answer.sampled.logprobs, np.float32))
        if all(map(np.array_equal, trained, wanted)):
            exact[row] = answer.sampled
    found.exact = len(exact)
    merged = to_trajectories(traces)
    found.trajectories = sorted(Counter(merged.rollout_id)[rollout_id] for rollout_id in asked)
    found.breaks, found.refused = dict(merged.breaks), dict(merged.refused)
    for place in range(len(merged)):
        parts = [exact.get(int(row)) for row in merged.rows[place].tolist()]
        if not _is_union(merged.prompt[place], merged.response[place], merged.response_mask[place], parts):
            found.problems.append("a merged trajectory is not what its calls sampled")


def _is_union(prompt: object, response: object, mask: object, parts: Sequence[Sampled | None]) -> bool:
    """Whether a trajectory is its last call's tokens, and its mask takes the replies of all its calls and nothing else."""
    known = [part for part in parts if part is not None]
    if len(known) != len(parts) or not known:
        return False
    replies = [token for part in known for token in part.response_ids]
    whole = [*known[-1].prompt_ids, *known[-1].response_ids]
    ids, marked = np.asarray(response), np.asarray(mask)
    return np.concatenate([np.asarray(prompt), ids]).tolist() == whole and ids[marked == 1].tolist() == replies


def _problems(found: Result, play: Play, traces: Traces) -> list[str]:
    statuses = Counter(rollout.status for rollout in traces.rollouts)
    rewards = [rewards[-1].value for rewards in traces.rewards.values() if rewards]
    checks = {
        f"rollouts ended {dict(statuses)}": statuses != {"succeeded": found.rollouts},
        f"rewards are {rewards}": rewards != [1.0] * found.rollouts,
        "the agent's process made no span": not found.own_spans,
        f"{found.strays} spans are under no rollout or another's": bool(found.strays),
        f"the model was called {found.calls} times": found.calls != play.calls * found.rollouts,
        f"{found.calls - found.exact} calls are not trained on as sampled": found.exact != found.calls,
        f"{found.joined} of {found.calls} calls are below a span of the agent's": play.joined and found.joined != found.calls,
        f"trajectories of a rollout: {found.trajectories}, broken {found.breaks}": found.trajectories
        != [play.trajectories] * found.rollouts
        or set(found.breaks) != set(play.breaks),
        f"samples refused: {found.refused}": bool(found.refused),
        f"verdicts are {found.verdicts}": found.verdicts != {"complete": found.rollouts},
    }
    return found.problems + [text for text, wrong in checks.items() if wrong]

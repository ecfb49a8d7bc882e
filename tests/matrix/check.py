"""What came of a play: the product's own columns and spans compared with what the model sampled. Pure.

Three witnesses that know nothing of each other: the cities in a prompt say whose call it is, the server's memory says which tokens it
sampled, and the product says what it would train on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agl_otel.adapters import to_trajectories, to_transitions
from agl_otel.adapters.sampling import Assumed
from agl_otel.types import Span
from agl_otel.types.columns import Traces
from agl_otel_hook import conventions
from tests.matrix.frameworks import Join, Play
from tests.matrix.model import VERSION, Served
from tests.matrix.script import Sampled

OURS = frozenset({"agl-runner", "agl-otel-proxy"})
"""`service.name` of processes that are no agent's."""
Cities = tuple[str, str]
TRAINED: Final = Assumed(1.0, temperatures="one")
"""What GRPO's default, `sampling_policy = "correct"`, takes of a run at temperature 1."""


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
    joined: dict[Join, int] = field(default_factory=dict[Join, int])
    """Of them, by how they are joined to spans of the agent's own."""
    trajectories: list[int] = field(default_factory=list[int])
    """Of each rollout."""
    trainable: int = 0
    """Of the calls: what GRPO would train on."""
    untrainable: dict[str, int] = field(default_factory=dict[str, int])
    """{field by which calls were sampled otherwise, or other reason: how many are refused for it}."""
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
    found.joined = _joined(served, spans)
    _tokens(found, asked, traces, served)
    _sampling(found, traces)
    found.verdicts = dict(Counter(verdict.kind for verdict in traces.verdicts.values()))
    found.problems = _problems(found, play, traces)
    return found


def _joined(served: Sequence[Served], spans: Sequence[Span]) -> dict[Join, int]:
    own = [span for span in spans if _is_agents(span)]
    by_id = {span.span_id: span for span in spans if span.name == conventions.SPAN_LLM}
    return dict(Counter(_join(answer, by_id, own) for answer in served))


def _join(answer: Served, recorded: Mapping[str, Span], own: Sequence[Span]) -> Join:
    call = recorded.get(answer.span_id)
    if call is None:
        return "address"
    if any(span.span_id == call.parent_id for span in own):
        return "traceparent"
    if any(span.attributes.get("gen_ai.response.id") == answer.answer_id for span in own):
        return "response id"
    if any([each.span_id for each in recorded.values() if _encloses(span, each)] == [answer.span_id] for span in own):
        return "time"
    return "address"


def _encloses(outer: Span, inner: Span) -> bool:
    same = (outer.rollout_id, outer.attempt_id) == (inner.rollout_id, inner.attempt_id)
    times = (outer.start_time, inner.start_time, inner.end_time, outer.end_time)
    return same and all(time is not None for time in times) and list(times) == sorted(time for time in times if time is not None)


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


def _sampling(found: Result, traces: Traces) -> None:
    """What training would take, and by which fields it refuses the rest."""
    batch = to_trajectories(traces, sampling=TRAINED)
    found.trainable = int(batch.calls.sum())
    reasons = Counter(batch.refused)
    del reasons["sampling_differs"]
    found.untrainable = dict(reasons + batch.differing)


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
        "the agent's process made no span": not found.own_spans and play.joined != "address",
        f"{found.strays} spans are under no rollout or another's": bool(found.strays),
        f"the model was called {found.calls} times": found.calls != play.calls * found.rollouts,
        f"{found.calls - found.exact} calls are not trained on as sampled": found.exact != found.calls,
        f"calls are joined by {found.joined}": play.flushes and found.joined != {play.joined: found.calls},
        f"trajectories of a rollout: {found.trajectories}, broken {found.breaks}": found.trajectories
        != [play.trajectories] * found.rollouts
        or set(found.breaks) != set(play.breaks),
        f"samples refused: {found.refused}": bool(found.refused),
        f"training takes {found.trainable} calls, refused by {found.untrainable}": set(found.untrainable) != set(play.untrainable)
        or (found.trainable != found.calls and not play.untrainable),
        f"verdicts are {found.verdicts}": found.verdicts != {"complete": found.rollouts},
    }
    return found.problems + [text for text, wrong in checks.items() if wrong]

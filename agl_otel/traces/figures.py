"""Figures for the user interfaces: of attempts and runs, and the outline of one rollout's spans. Pure functions of tables and rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pydantic import Field

from agl_otel.spans.calls import Outline, pairs
from agl_otel.spans.log_records import evaluated
from agl_otel.spans.operations import TOOL_LIKE, is_agent
from agl_otel.traces.facts import ReadFacts, attempt_facts
from agl_otel.traces.rows import rewards_of, unread_labels
from agl_otel.traces.tokens import Table, reward_rows, strings
from agl_otel.traces.verdict import decide
from agl_otel.types import Attempt, Model, RunMembers, TrainingRun, Verdict
from agl_otel.types.bridges import unbridged
from agl_otel.types.columns import AttemptKey, Reward
from agl_otel.types.sampling import Contract
from agl_otel.types.scores import SCORED_MODES, Score, asked_of, is_usable

SETTLED_SECONDS: Final = 30.0  # after an attempt's end, until which its last spans may still arrive
BUCKETS: Final = 100
"""Points of a curve for rollouts without steps."""


class AttemptFigures(Model):
    """The figures of one attempt. Tokens are counted in model calls recorded by the proxy."""

    rollout_id: str
    attempt_id: str
    verdict: Verdict
    final: bool = True
    """Whether the verdict will not change: false while the attempt runs and, if incomplete, within SETTLED_SECONDS of its end."""
    reward: float | None = None
    """The last primary reward; None where there is none, or it does not count (types/scores.py)."""
    rewards: dict[str, float] = Field(default_factory=dict[str, float])
    """The last value of each named dimension, without those whose last one does not count."""
    conversation_ids: list[str] = Field(default_factory=list[str])
    """The values of `gen_ai.conversation.id` on its spans, in order of time."""
    unread_labels: dict[str, int] = Field(default_factory=dict[str, int])
    """Evaluations without a score whose label stands for no number: {label: how many}. They are no rewards."""
    notes: list[str] = Field(default_factory=list[str])
    """What of its evaluations is unusual, in words: labels that are no number, and times after its end."""
    late_evaluations: int = 0
    """Evaluations from after the attempt's end, by the clocks of both. They count: judges run then, but an agent may log then, too."""
    spans: int = 0
    errors: int = 0
    """Spans with an error; a failed call that both agent and proxy recorded has two, and is one node of a tree."""
    calls: int = 0
    """Requests that the proxy recorded, with the tries that an SDK repeated; the choices of one (n > 1) count once."""
    prompt_tokens: int = 0
    """That the model server read: of each call the whole prompt."""
    response_tokens: int = 0


class CurvePoint(Model):
    """The rollouts of one step and mode. `rewarded` counts those with a reward; in SCORED_MODES only succeeded ones."""

    step: int
    mode: str
    rollouts: int
    ended: int
    rewarded: int
    reward_mean: float | None
    """The score of those that have ended (types/scores.py); None where none has a reward."""
    reward_std: float | None
    reward_min: float | None
    reward_max: float | None
    spans: int
    errors: int
    prompt_tokens: int
    """That the model server read: of each call the whole prompt."""
    response_tokens: int
    made: bool = True
    """False of a step that the run had not made when it was stopped or failed (TrainingRun.has_made)."""

    @property
    def score(self) -> Score:
        """The score of its ended rollouts; outside of SCORED_MODES of those with a reward."""
        asked = asked_of(self.mode, ended=self.ended, rewarded=self.rewarded)
        return Score((self.reward_mean or 0.0) * asked, asked, asked - self.rewarded)


@dataclass(frozen=True)
class Curve:
    """The figures of a run over its steps."""

    by: str
    """`step`, or `order` if all rollouts have the same step: then each point is a hundredth of them, in the order of creation."""
    points: list[CurvePoint]

    def of_training(self, training: TrainingRun | None) -> Curve:
        """Return the curve with the steps marked that this run did not make; None: a run of which no outcome is known."""
        if self.by != "step" or training is None:
            return self
        return Curve(self.by, [point.model_copy(update={"made": training.has_made(point.step)}) for point in self.points])


def attempt_figures(table: Table, attempts: Sequence[Attempt], now: float) -> list[AttemptFigures]:
    """Compute the figures of these attempts from the table of sql/figures.sql, at `now` (Unix seconds)."""
    facts = ReadFacts.of(table)
    rows = reward_rows(table)
    rewards, unread = rewards_of(rows), unread_labels(rows)
    conversations = _conversations(table)
    sums = table.group_by(["RolloutId", "AttemptId"]).aggregate(
        [("IsSpan", "sum"), ("IsError", "sum"), ("IsFirstChoice", "sum"), ("ReadTokens", "sum"), ("ResponseTokens", "sum")]
    )
    counts: dict[AttemptKey, Mapping[str, Any]] = {(row["RolloutId"], row["AttemptId"]): row for row in sums.to_pylist()}
    found: list[AttemptFigures] = []
    for attempt in attempts:
        key = (attempt.rollout_id, attempt.attempt_id)
        own, row = rewards.get(key, []), counts.get(key, {})
        primary = [reward.value for reward in own if reward.index == 0]
        verdict = decide(attempt_facts(facts, attempt))
        figures = AttemptFigures(
            rollout_id=attempt.rollout_id,
            attempt_id=attempt.attempt_id,
            verdict=verdict,
            final=is_final(verdict, attempt, now),
            reward=primary[-1] if primary and is_usable(primary[-1]) else None,
            rewards=_named(own),
            conversation_ids=conversations.get(key, []),
            unread_labels=unread.get(key, {}),
            late_evaluations=(late := _made_after(attempt.end_time, own)),
            notes=_notes(unread.get(key, Counter()), late),
            spans=row.get("IsSpan_sum", 0),
            errors=row.get("IsError_sum", 0),
            calls=row.get("IsFirstChoice_sum", 0),
            prompt_tokens=row.get("ReadTokens_sum", 0),
            response_tokens=row.get("ResponseTokens_sum", 0),
        )
        found.append(figures)
    return found


def _made_after(end: float | None, rewards: Iterable[Reward]) -> int:
    return sum(each.time is not None and each.time > end * 10**9 for each in rewards) if end is not None else 0


def _notes(unread: Counter[str], late: int) -> list[str]:
    notes: list[str] = []
    if unread:
        labels = ", ".join(f"{count} × {label!r}" for label, count in sorted(unread.items(), key=lambda each: (-each[1], each[0])))
        notes.append(f"evaluations without a score, whose labels are no number: {labels:.300}")
    if late:
        notes.append(f"evaluations from after the attempt's end, which count: {late}")
    return notes


def _named(rewards: Iterable[Reward]) -> dict[str, float]:
    last = {reward.name or str(reward.index): reward.value for reward in rewards}
    return {name: value for name, value in last.items() if is_usable(value)}


def _conversations(table: Table) -> dict[AttemptKey, list[str]]:
    named = table.select(["RolloutId", "AttemptId", "ConversationId", "Time"]).filter(
        np.array([name != "" for name in strings(table, "ConversationId")], bool)
    )
    found: dict[AttemptKey, dict[str, None]] = {}
    for row in sorted(named.to_pylist(), key=lambda row: row["Time"]):
        found.setdefault((row["RolloutId"], row["AttemptId"]), {})[row["ConversationId"]] = None
    return {key: list(names) for key, names in found.items()}


def is_final(verdict: Verdict, attempt: Attempt, now: float) -> bool:
    """Whether a verdict read at `now` will not change."""
    if attempt.end_time is None:
        return False
    return verdict.kind != "incomplete" or now - attempt.end_time > SETTLED_SECONDS


def curve_of(members: RunMembers, table: Table, finished: frozenset[str]) -> Curve:
    """Compute a run's curve from its members and the table of sql/run_figures.sql, which may hold rows of others."""
    import pyarrow as pa
    from pyarrow import compute

    pc: Any = compute  # untyped: its functions are generated on import
    count = len(members.rollout_ids)
    steps = np.asarray(members.steps, np.int64)
    by = "step" if count and steps.min() != steps.max() else "order"
    if by == "order":
        steps = np.arange(count) * min(BUCKETS, count) // max(count, 1)
    place = pc.index_in(pa.array(members.rollout_ids, pa.string()), value_set=table.column("RolloutId").cast(pa.string()).combine_chunks())
    figures = table.drop_columns(["RolloutId"]).take(place)
    rewards = pc.cast(figures.column("Reward"), pa.float64())
    scored = pc.is_in(pa.array(members.modes, pa.string()), value_set=pa.array(sorted(SCORED_MODES)))
    succeeded = pc.equal(pa.array(members.statuses, pa.string()), "succeeded")
    rewards = pc.if_else(pc.or_(pc.invert(scored), succeeded), rewards, pa.scalar(None, pa.float64()))
    ended = pc.is_in(pa.array(members.statuses, pa.string()), value_set=pa.array(sorted(finished)))
    columns = {
        "step": pa.array(steps),
        "mode": pa.array(members.modes, pa.string()),
        "ended": pc.cast(ended, pa.int64()),
        "reward": rewards,
        **{name: pc.fill_null(pc.cast(figures.column(name), pa.int64()), 0) for name in _SUMS},
    }
    grouped = pa.table(columns).group_by(["step", "mode"]).aggregate([
        ("mode", "count"), ("ended", "sum"), *(("reward", how) for how in ("count", "sum", "stddev", "min", "max")),
        *((name, "sum") for name in _SUMS),
    ]).sort_by([("step", "ascending"), ("mode", "ascending")])  # fmt: skip
    return Curve(by, [_point(row) for row in grouped.to_pylist()])


_SUMS: Final = ("Spans", "Errors", "PromptTokens", "ResponseTokens")


def _point(row: Mapping[str, Any]) -> CurvePoint:
    asked = asked_of(row["mode"], ended=row["ended_sum"], rewarded=row["reward_count"])
    return CurvePoint(
        step=row["step"],
        mode=row["mode"],
        rollouts=row["mode_count"],
        ended=row["ended_sum"],
        rewarded=row["reward_count"],
        reward_mean=Score(row["reward_sum"], asked, asked - row["reward_count"]).mean if row["reward_count"] else None,
        reward_std=row["reward_stddev"],
        reward_min=row["reward_min"],
        reward_max=row["reward_max"],
        spans=row["Spans_sum"],
        errors=row["Errors_sum"],
        prompt_tokens=row["PromptTokens_sum"],
        response_tokens=row["ResponseTokens_sum"],
    )


class OutlineSpan(Model):
    """A span for a waterfall or tree. Start and duration are nanoseconds as text, since they exceed JavaScript's exact numbers."""

    attempt_id: str
    sequence_id: int
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    service: str
    status: str
    message: str
    start_nano: str
    duration_nano: str
    process: str
    is_call: bool
    call: int
    choice: int
    model: str
    response_id: str
    within: str = ""
    """For a call recorded by the proxy, the agent's own span of the same call, drawn as one node with it; empty if there is none."""
    model_version: str
    agent: str
    conversation_id: str = ""
    is_agent: bool = False
    """Whether it is an agent, a workflow or a plan, by OpenTelemetry's conventions."""
    operation: str = ""
    """`gen_ai.operation.name`."""
    operation_name: str = ""
    """The name that an agent gave a step of its own (`agentlightning.operation.name`)."""
    tool: str
    """The tool's name; of a retrieval and of memory the operation."""
    incomplete: str
    sampling: list[str]
    """What is unusual about a call's sampling, in words: what its agent set itself, what a policy replaced, raw log-probs."""
    unbridged: str = ""
    """Why no bridge continued the conversation of a call, a key of types.bridges.UNBRIDGED; empty if none was refused."""
    prompt_tokens: int
    response_tokens: int
    rewards: dict[str, float]
    events: int


def outline(rows: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[OutlineSpan]:
    """Convert rows of sql/outline.sql; `records` are the rollout's evaluations: those of no span are left out."""
    rollout_id = records[0]["rollout_id"] if records else ""
    keys = [(rollout_id, row["AttemptId"], row["TraceId"], row["SpanId"], row["ResponseId"]) for row in rows]
    added: dict[int, list[Mapping[str, Any]]] = {}
    for record, place in evaluated(keys, records):
        if place is not None:
            added.setdefault(place, []).append(record["row"])
    return [_outline_span(row, added.get(place, ())) for place, row in enumerate(rows)]


def _outline_span(row: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> OutlineSpan:
    own = {"RolloutId": "", "AttemptId": "", "Evaluated": ""}
    rewards = rewards_of([{**row, "Time": row["StartNano"], **own}, *({**record, **own} for record in records)]).get(("", ""), [])
    return OutlineSpan(
        attempt_id=row["AttemptId"],
        sequence_id=row["SequenceId"],
        trace_id=row["TraceId"],
        span_id=row["SpanId"],
        parent_id=row["ParentSpanId"],
        name=row["SpanName"],
        kind=row["SpanKind"],
        service=row["ServiceName"],
        status=row["StatusCode"],
        message=row["StatusMessage"],
        start_nano=str(row["StartNano"]),
        duration_nano=str(row["Duration"]),
        process=row["Process"],
        is_call=bool(row["IsCall"]),
        call=row["Call"],
        choice=row["Choice"],
        model=row["Model"],
        response_id=row["ResponseId"],
        model_version=row["ModelVersion"],
        agent=row["Agent"] or row["Workflow"],
        is_agent=is_agent(row["Operation"], row["SpanName"]),
        operation=row["Operation"],
        operation_name=row["OperationName"],
        conversation_id=row["ConversationId"],
        tool=row["Tool"] or (row["Operation"] if row["Operation"] in TOOL_LIKE else ""),
        incomplete=row["Incomplete"],
        sampling=contract.notes({}) if (contract := Contract.loads(row["Sampling"])) is not None else [],
        unbridged=unbridged(row["Bridge"]),
        prompt_tokens=row["PromptTokens"],
        response_tokens=row["ResponseTokens"],
        rewards=_named(rewards),
        events=row["EventCount"],
    )


def joined(spans: Iterable[OutlineSpan]) -> list[OutlineSpan]:
    """Set `within` of the proxy's spans to the agent's own span of the same call, unless that span contains several calls."""
    found = list(spans)
    made = pairs(map(_outline, found))
    calls = Counter(pair.agents for pair in made)
    within = {pair.proxied: pair.agents[1] for pair in made if calls[pair.agents] == 1}
    return [span.model_copy(update={"within": within[key]}) if (key := (span.trace_id, span.span_id)) in within else span for span in found]


def _outline(span: OutlineSpan) -> Outline:
    return Outline(
        key=(span.trace_id, span.span_id),
        parent=(span.trace_id, span.parent_id),
        attempt_id=span.attempt_id,
        name=span.name,
        response_id=span.response_id,
        model=span.model,
        is_http=span.kind == "Client",
        is_proxied=span.is_call,
        choice=span.choice,
        operation=span.operation,
    )

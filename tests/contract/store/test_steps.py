"""Training steps as spans on a real stack: each version leads to its attempts, without losses or duplicates."""

from __future__ import annotations

import json
import math
import uuid
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from agl_otel.errors import InvalidIdError
from agl_otel.store import LightningStore
from agl_otel.store.steps import LINKS, step_requests
from agl_otel.traces.steps import span_id_of, trace_id_of
from agl_otel.types import AttemptedRollout, Span, TrainingStage, TrainingStep
from agl_otel_hook import conventions
from tests.unit.adapters.spans import key_values


async def attempted(store: LightningStore, *, root: bool = True) -> AttemptedRollout:
    """A rollout whose attempt has a root span, made later than the agent's first one, or none at all."""
    begun = await store.start_rollout({"question": 1})
    ids: dict[str, Any] = {"rollout_id": begun.rollout_id, "attempt_id": begun.attempt.attempt_id}
    trace = uuid.uuid4().hex
    names = [("agent", "1" * 16, "2" * 16), *([(conventions.SPAN_ATTEMPT, "2" * 16, None)] if root else [])]
    await store.add_many_spans(
        [
            Span.from_attributes(**ids, sequence_id=n + 1, name=name, trace_id=trace, span_id=span_id, parent_id=parent, attributes={})
            for n, (name, span_id, parent) in enumerate(names)
        ]
    )
    return begun


def a_step(attempts: list[tuple[str, str]], run_id: str | None = None, step: int = 1, **more: Any) -> TrainingStep:
    return TrainingStep(
        run_id=run_id or f"grpo-{uuid.uuid4().hex[:8]}",
        algorithm="grpo",
        step=step,
        resources_id="rs-1",
        version_before=str(step),
        version_after=str(step + 1),
        samples=len(attempts),
        refused=2,
        start_time=1_700_000_000.25 + step,
        end_time=1_700_000_001.5 + step,
        attempts=attempts,
        **more,
    )


async def send(store: LightningStore, step: TrainingStep, roots: dict[tuple[str, str], tuple[str, str]]) -> None:
    """Record a step of attempts that were never run."""
    await (await store._open()).writer.write(step_requests(step, roots))  # pyright: ignore[reportPrivateUsage]  # below what users call


def key(begun: AttemptedRollout) -> tuple[str, str]:
    return begun.rollout_id, begun.attempt.attempt_id


async def test_a_version_leads_to_its_step_and_the_step_to_its_attempts(store: LightningStore) -> None:
    first, second = await attempted(store), await attempted(store)
    metrics = {"reward_mean": 0.5, "rollouts": 8, "weights_version": "1", "lost": float("nan")}
    step = a_step([key(first)], metrics=metrics)
    other = a_step([key(first), key(second)], step.run_id, step=2)
    still = a_step([key(second)], step.run_id, step=3).model_copy(update={"version_before": "3", "version_after": "3"})
    assert [await store.record_step(each) for each in (step, other, still)] == [True, True, True]
    finite = step.model_copy(update={"metrics": {name: value for name, value in metrics.items() if name != "lost"}})
    assert await store.training_steps(step.run_id) == [finite, other, still]
    assert await store.training_steps(step.run_id, version=3) == [other]
    assert await store.training_steps(step.run_id, version=9) == []
    (run,) = [run for run in await store.training_runs() if run.run_id == step.run_id]
    assert (run.algorithm, run.steps, run.last_step, run.last_version) == ("grpo", 3, 3, "3")


async def test_the_outcome_of_a_run_is_the_latest_and_needs_no_step(store: LightningStore) -> None:
    async def found(run_id: str) -> list[tuple[str, int, str]]:
        return [(run.algorithm, run.steps, run.outcome) for run in await store.training_runs(run_id=run_id)]

    without, step = f"sft-{uuid.uuid4().hex[:8]}", a_step([])
    for outcome in ("interrupted", "", "error: step 1 has nothing to train on"):
        await store.record_outcome(without, outcome, algorithm="sft")
        assert await found(without) == [("sft", 0, outcome)]
    await store.record_step(step)
    assert await found(step.run_id) == [("grpo", 1, "")]
    await store.record_outcome(step.run_id, "finished", algorithm="grpo")
    assert await found(step.run_id) == [("grpo", 1, "finished")]
    assert await store.training_runs(run_id="another") == [] and await store.training_steps(without) == []
    assert {without, step.run_id} <= {run.run_id for run in await store.training_runs()}


async def test_a_step_has_the_attributes_that_are_proposed_for_opentelemetry(store: LightningStore) -> None:
    step = a_step([key(await attempted(store))], step=3)
    await store.record_step(step)
    (span,) = await store.spans_of_traces([trace_id_of(step.run_id)])
    assert {name: value for name, value in span.attributes.items() if name.startswith("rl.")} == {
        "rl.system": "agl-otel", "rl.run.id": step.run_id, "rl.algorithm": "grpo", "rl.loop.iteration": 3, "rl.train.batch_size": 1,
    }  # fmt: skip


async def test_links_name_the_root_spans_of_attempts_as_viewers_follow_them(store: LightningStore) -> None:
    rooted, bare = await attempted(store), await attempted(store, root=False)
    step = a_step([key(rooted), key(bare), ("ro-unknown", "at-unknown")])
    await store.record_step(step)
    (span,) = await store.spans_of_traces([trace_id_of(step.run_id)])
    assert (span.name, span.rollout_id, span.resource.attributes["service.name"]) == (conventions.SPAN_TRAIN_STEP, "", "agl-otel-trainer")
    roots = [(await store.spans(begun.rollout_id))[-1] for begun in (rooted, bare)]
    assert roots[0].name == conventions.SPAN_ATTEMPT
    assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [(root.trace_id, root.span_id) for root in roots]
    assert [link.attributes for link in span.links] == [
        {conventions.ROLLOUT_ID: begun.rollout_id, conventions.ATTEMPT_ID: begun.attempt.attempt_id} for begun in (rooted, bare)
    ]
    (found,) = await store.training_steps(step.run_id)
    assert (found.attempts, found.unlinked) == ([key(rooted), key(bare)], 1)


async def test_a_rollout_without_a_chosen_attempt_stands_for_all_of_its_attempts(store: LightningStore) -> None:
    begun = await attempted(store)
    again = await store.start_attempt(begun.rollout_id)
    more: dict[str, Any] = {"rollout_id": begun.rollout_id, "attempt_id": again.attempt.attempt_id, "sequence_id": 9}
    await store.add_span(Span.from_attributes(**more, name="agent", attributes={}))
    step = a_step([(begun.rollout_id, ""), ("ro-unknown", "")])
    await store.record_step(step)
    (found,) = await store.training_steps(step.run_id)
    assert (sorted(found.attempts), found.unlinked) == (sorted([key(begun), key(again)]), 1)


async def test_a_step_recorded_again_is_stored_once(store: LightningStore) -> None:
    begun = await attempted(store)
    step = a_step([key(begun)])
    assert await store.record_step(step)
    assert not await store.record_step(step.model_copy(update={"end_time": step.end_time + 9, "metrics": {"seconds": 9.0}}))
    assert await store.record_steps([step, a_step([], step.run_id, step=2)]) == 1
    assert (await store.training_steps(step.run_id))[0] == step
    count = f"SELECT count() AS n FROM otel_traces WHERE TraceId = '{trace_id_of(step.run_id)}'"
    assert int((await store.reader.query(count))[0]["n"]) == 2


async def test_the_latest_of_repeated_steps_with_other_outcomes_counts(store: LightningStore) -> None:
    one, other = await attempted(store), await attempted(store)
    root = (await store.reader.roots([one.rollout_id]))[key(one)]
    many = [(f"ro-many-{n:04d}", f"at-{n}") for n in range(LINKS + 1)]
    first = a_step(many)
    await send(store, first, dict.fromkeys(many, root))
    again = a_step([key(other)], first.run_id)
    assert await store.record_step(again)
    assert not await store.record_step(again)
    assert await store.training_steps(first.run_id) == [again]
    assert await store.training_steps(first.run_id, version=2) == [again]
    spans = await store.spans_of_traces([trace_id_of(first.run_id)])
    (shown,) = [span for span in spans if span.name == conventions.SPAN_TRAIN_STEP]
    assert len(shown.links) == 1


@pytest.mark.parametrize(
    "named", [{conventions.INVALID: "the sender's key is bound to another attempt"}, {conventions.ROLLOUT_ID: "ro-forged"}]
)
async def test_a_refused_span_or_an_agents_span_is_not_a_step(named: dict[str, str], store: LightningStore) -> None:
    """The Go collector keeps what it refuses, without ids; what has ids is of an attempt, whatever it is called."""
    begun = await attempted(store)
    true, made_up = a_step([key(begun)]), a_step([key(begun)])
    forged = true.model_copy(update={"version_after": "99", "algorithm": "forged"})
    again = a_step([], true.run_id, step=2)

    async def forge(step: TrainingStep) -> None:
        requests = [ExportTraceServiceRequest.FromString(raw) for raw in step_requests(step, {})]
        for request in requests:
            request.resource_spans[0].scope_spans[0].spans[0].attributes.extend(key_values(named))
        await (await store._open()).writer.write([request.SerializeToString() for request in requests])  # pyright: ignore[reportPrivateUsage]  # below what users call

    await forge(again)  # before the step itself: it is not known by that
    assert await store.record_steps([true, again]) == 2
    await forge(forged)
    await forge(made_up)
    assert not await store.record_step(true)
    assert await store.training_steps(true.run_id) == [true, again]
    assert await store.training_steps(made_up.run_id) == []
    runs = {run.run_id: run for run in await store.training_runs()}
    assert made_up.run_id not in runs
    assert (runs[true.run_id].algorithm, runs[true.run_id].last_version) == ("grpo", "3")
    shown = {span.span_id: span for span in await store.spans_of_traces([trace_id_of(true.run_id)])}
    if conventions.INVALID in named:  # viewers see what was stored under these ids last, but for what was refused
        assert shown[span_id_of(true.run_id, 1)].attributes[conventions.TRAIN_VERSION_AFTER] == "2"


async def test_links_beyond_the_limit_of_a_span_are_kept(store: LightningStore) -> None:
    begun = await attempted(store)
    root = (await store.reader.roots([begun.rollout_id]))[key(begun)]
    many = [(f"ro-many-{n:04d}", f"at-{n}") for n in range(2 * LINKS + 1)]
    step = a_step(many)
    await send(store, step, dict.fromkeys(many, root))
    (found,) = await store.training_steps(step.run_id)
    assert (found.attempts, found.unlinked) == (many, 0)
    spans = await store.spans_of_traces([trace_id_of(step.run_id)])
    assert sorted(len(span.links) for span in spans) == [1, LINKS, LINKS]
    parent = next(span for span in spans if span.name == conventions.SPAN_TRAIN_STEP)
    assert {span.parent_id for span in spans if span is not parent} == {parent.span_id}
    assert (await store.training_steps(step.run_id, version=2))[0].attempts == many


async def test_a_run_id_that_breaks_the_rule_is_named(store: LightningStore) -> None:
    with pytest.raises(InvalidIdError, match="run id"):
        await store.record_step(a_step([], run_id="no spaces"))


async def test_steps_are_json_both_ways(store: LightningStore) -> None:
    step = a_step([("ro-1", "at-1")])
    assert TrainingStep.model_validate(json.loads(step.model_dump_json())) == step


async def test_a_version_of_a_set_leads_to_the_cycle_that_published_it(store: LightningStore) -> None:
    served, run_id = f"production-{uuid.uuid4().hex[:8]}", f"improve-{uuid.uuid4().hex[:8]}"

    def cycle(number: int, verdict: str, before: int, after: int) -> TrainingStep:
        versions = {"resources_id": served, "version_before": str(before), "version_after": str(after)}
        return a_step([], run_id, number, metrics={"verdict": verdict}).model_copy(update={"algorithm": "improve", **versions})

    cycles = [cycle(1, "promoted", 1, 3), cycle(2, "refused", 3, 3), cycle(3, "rolled_back", 3, 4), cycle(4, "promoted", 5, 7)]
    for each in (*cycles, cycle(3, "rolled_back", 3, 5), a_step([])):  # the third is recorded again, with another outcome
        await store.record_step(each)
    found = await store.reader.publishing_steps(served, 10)
    assert [(step.run_id, step.step, step.verdict) for step in found] == [
        (run_id, 4, "promoted"),
        (run_id, 3, "rolled_back"),
        (run_id, 1, "promoted"),
    ]
    assert [(step.version_before, step.version_after) for step in found] == [("5", "7"), ("3", "5"), ("1", "3")]
    assert len(await store.reader.publishing_steps(served, 1)) == 1 and await store.reader.publishing_steps("none", 9) == []
    [run] = await store.training_runs(run_id=run_id)
    assert (run.steps, run.promoted) == (4, 2)


async def test_stages_are_read_by_their_ends_and_the_latest_recording_counts(store: LightningStore) -> None:
    run_id = f"improve-{uuid.uuid4().hex[:8]}"

    def stage(name: str, start: float, end: float, step: int = 1, **metrics: Any) -> TrainingStage:
        about: dict[str, Any] = {"run_id": run_id, "algorithm": "improve", "step": step, "name": name, "resources_id": "production"}
        return TrainingStage(**about, start_time=1_700_000_000.0 + start, end_time=1_700_000_000.0 + end, metrics=metrics)

    window, gate = stage("window", 0, 1, attempts=8, selection="s@1"), stage("gate", 2, 3.5, drift=0.25, why="")
    for each in (gate, stage("window", 0, 1, attempts=7), window, stage("window", 4, 5, step=2)):
        await store.record_stage(each)
    assert await store.training_stages(run_id) == [window, gate, stage("window", 4, 5, step=2)]
    await store.record_step(a_step([], run_id, 1))
    assert [step.step for step in await store.training_steps(run_id)] == [1], "a stage is no step"
    [run] = await store.training_runs(run_id=run_id)
    assert run.steps == 1
    assert await store.training_stages("none") == []


async def test_a_figure_that_is_no_number_is_not_recorded_of_a_stage(store: LightningStore) -> None:
    run_id = f"improve-{uuid.uuid4().hex[:8]}"
    about: dict[str, Any] = {"run_id": run_id, "algorithm": "improve", "step": 1, "name": "gate", "start_time": 1e9, "end_time": 1e9}
    await store.record_stage(TrainingStage(**about, metrics={"held_out_gain_low": -math.inf, "held_out_after": 1.0}))
    [found] = await store.training_stages(run_id)
    assert found.metrics == {"held_out_after": 1.0}


async def test_who_writes_into_the_trace_of_a_run_hides_none_of_its_steps(store: LightningStore) -> None:
    """Its trace id can be computed from its id; spans in it that name no rollout would else get that of the trace, or of their parent."""
    run_id = f"improve-{uuid.uuid4().hex[:8]}"
    begun = await store.start_rollout({"question": 1})
    ids: dict[str, Any] = {"rollout_id": begun.rollout_id, "attempt_id": begun.attempt.attempt_id, "trace_id": trace_id_of(run_id)}
    opener = Span.from_attributes(**ids, sequence_id=1, name=conventions.SPAN_ATTEMPT, span_id="1" * 16, parent_id=None, attributes={})
    parent = Span.from_attributes(**ids, sequence_id=2, name="hello", span_id=span_id_of(run_id, 2), parent_id="1" * 16, attributes={})
    await store.add_many_spans([opener, parent])
    about: dict[str, Any] = {"run_id": run_id, "algorithm": "improve", "start_time": 1_700_000_000.0, "end_time": 1_700_000_001.0}
    stages = [TrainingStage(**about, step=2, name=name) for name in ("window", "update")]
    await store.record_outcome(run_id, "", algorithm="improve")
    assert await store.record_step(a_step([key(begun)], run_id, 1))
    for stage in stages:
        await store.record_stage(stage)
    assert not await store.record_step(a_step([key(begun)], run_id, 1)), "it is known"
    assert [step.step for step in await store.training_steps(run_id)] == [1]
    assert sorted(stage.name for stage in await store.training_stages(run_id)) == ["update", "window"]
    assert [run.steps for run in await store.training_runs(run_id=run_id)] == [1]


@pytest.mark.parametrize("name", ["agentlightning.train.stage gate", "agentlightning.train.stage", conventions.SPAN_TRAIN_STEP])
@pytest.mark.parametrize("number", [None, "five", math.nan, math.inf, [1], 10**18])
async def test_spans_that_no_trainer_recorded_are_left_out(store: LightningStore, name: str, number: Any) -> None:
    """A stack without a token takes them of anybody."""
    run_id = f"improve-{uuid.uuid4().hex[:8]}"
    attributes = {conventions.TRAIN_RUN: run_id} | ({} if number is None else {conventions.TRAIN_STEP_NUMBER: number})
    odd = ProtoSpan(trace_id=bytes.fromhex(trace_id_of(run_id)), span_id=b"\x11" * 8, name=name, attributes=key_values(attributes))
    odd.start_time_unix_nano = odd.end_time_unix_nano = 10**18
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[odd])])]).SerializeToString()
    await (await store._open()).writer.write([request], inherits=False)  # pyright: ignore[reportPrivateUsage]  # below what users call
    assert await store.record_step(a_step([], run_id, 1))
    assert [step.step for step in await store.training_steps(run_id)] == [1]
    assert await store.training_stages(run_id) == []

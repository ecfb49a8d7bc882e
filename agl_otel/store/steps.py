"""The part of the store for training runs and their steps: each step is a span, linked to the root spans of the attempts that it consumed.

So a trace view, or `training_steps` in Python, leads from a version of the weights to its data. OpenTelemetry's SDKs and many backends
keep 128 links per span: further attempts are linked from child spans of the step's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agl_otel.store.connections import Connected
from agl_otel.store.figures import TRAINER
from agl_otel.store.otlp import encodable, unix_nano
from agl_otel.traces.steps import METRIC, digest_of, run_span_id_of, span_id_of, trace_id_of
from agl_otel.types import TrainingRun, TrainingStage, TrainingStep, check_id
from agl_otel_hook import conventions, wire

if TYPE_CHECKING:
    from agl_otel.types.columns import AttemptKey

LINKS: Final = 128  # of one span: the default limit in OpenTelemetry's specification
REQUEST_SPANS: Final = 1000  # in one request: some 20 MB of links, within 64 MiB
INTERNAL: Final = 1  # OTLP's number for the kind
Root = tuple[str, str]
"""(trace id, span id)."""


class Steps(Connected):
    """The steps of training runs."""

    async def record_step(self, step: TrainingStep) -> bool:
        """Record one step, as `record_steps` does; return whether it was new."""
        return await self.record_steps([step]) == 1

    async def record_steps(self, steps: Sequence[TrainingStep]) -> int:
        """Store steps of training runs, readable when this returns; return how many were new.

        A stored step is kept, unless it was repeated with another outcome: then the latest counts.

        Raises InvalidIdError, UnavailableError if no collector accepts them, DataError if they are refused.
        """
        if not steps:
            return 0
        for step in steps:
            check_id(step.run_id, "run id")
        connection = await self._open()
        await connection.reader.barrier()
        known: dict[str, str] = {}
        for run_id in {step.run_id for step in steps}:
            known |= await connection.reader.known_steps(trace_id_of(run_id), [span_id_of(run_id, step.step) for step in steps])
        new = [step for step in steps if known.get(span_id_of(step.run_id, step.step)) != digest_of(step)]
        roots = await connection.reader.roots(sorted({rollout_id for step in new for rollout_id, _ in step.attempts}))
        await connection.writer.write((request for step in new for request in step_requests(step, roots)), inherits=False)
        return len(new)

    async def record_stage(self, stage: TrainingStage) -> None:
        """Store a stage, as far as it is, as a span below that of its step, which may be recorded later; the latest recording counts.

        Raises UnavailableError if no collector accepts it.
        """
        await (await self._open()).writer.write([_request([stage_span(stage)])], inherits=False)

    async def training_stages(self, run_id: str) -> list[TrainingStage]:
        """Return the stages of a training run's steps, in the order of their ends, each as it was recorded last."""
        connection = await self._open()
        await connection.reader.barrier()
        return await connection.reader.stages(run_id)

    async def training_steps(self, run_id: str, *, version: str | int | None = None) -> list[TrainingStep]:
        """Return the steps of a training run in order, each with its consumed attempts; with `version` only those that made it."""
        connection = await self._open()
        await connection.reader.barrier()
        return await connection.reader.steps(run_id, version="" if version is None else str(version))

    async def record_outcome(self, run_id: str, outcome: str, *, algorithm: str) -> None:
        """Record how a training run ended (TrainingRun.outcome), or by an empty outcome that it has begun; the latest counts.

        Raises InvalidIdError, UnavailableError if no collector accepts it.
        """
        check_id(run_id, "run id")
        await (await self._open()).writer.write([outcome_request(run_id, outcome, algorithm, time.time_ns())], inherits=False)

    async def training_runs(self, *, limit: int = 100, run_id: str = "") -> list[TrainingRun]:
        """Return the training runs with the latest steps, the latest first; with `run_id` that one alone."""
        connection = await self._open()
        await connection.reader.barrier()
        return await connection.reader.runs(limit, run_id=run_id)


def outcome_request(run_id: str, outcome: str, algorithm: str, now_nano: int) -> bytes:
    """Serialise a run's outcome as an OTLP request."""
    ids = {conventions.TRAIN_RUN: run_id, conventions.TRAIN_ALGORITHM: algorithm, conventions.TRAIN_OUTCOME: outcome}
    trace_id, span_id = (bytes.fromhex(each) for each in (trace_id_of(run_id), run_span_id_of(run_id)))
    message = wire.message(trace_id, span_id, b"", conventions.SPAN_TRAIN_RUN, INTERNAL, now_nano, now_nano, encodable(ids), [])
    return _request([wire.field_of(message)])


def step_requests(step: TrainingStep, roots: Mapping[AttemptKey, Root]) -> list[bytes]:
    """Serialise a step as OTLP requests; its own span comes last, so that it never exists without all of its links."""
    linked, unlinked = _links(step, roots)
    chunks = [linked[start : start + LINKS] for start in range(0, len(linked), LINKS)] or [[]]
    ids = {
        **_ids(step),
        conventions.TRAIN_VERSION_BEFORE: step.version_before,
        conventions.TRAIN_VERSION_AFTER: step.version_after,
        conventions.TRAIN_DIGEST: digest_of(step),
    }
    counts = {
        conventions.TRAIN_SAMPLES: step.samples,
        conventions.TRAIN_REFUSED: step.refused,
        conventions.TRAIN_ATTEMPTS: len(linked) + unlinked,
    }
    proposed = {
        conventions.RL_SYSTEM: "agl-otel",
        conventions.RL_RUN: step.run_id,
        conventions.RL_ALGORITHM: step.algorithm,
        conventions.RL_ITERATION: step.step,
        conventions.RL_BATCH_SIZE: step.samples,
    }
    spans = [
        _span(step, place, conventions.SPAN_TRAIN_EVIDENCE, {**ids, conventions.TRAIN_EVIDENCE_PLACE: place}, chunk)
        for place, chunk in enumerate(chunks)
        if place
    ]
    spans.append(_span(step, 0, conventions.SPAN_TRAIN_STEP, {**ids, **counts, **proposed, **_metrics(step.metrics)}, chunks[0]))
    return [_request(spans[start : start + REQUEST_SPANS]) for start in range(0, len(spans), REQUEST_SPANS)]


def stage_span(stage: TrainingStage) -> bytes:
    """Serialise a stage of a step as a span with an id of its own."""
    attributes = {**_ids(stage), conventions.TRAIN_STAGE: stage.name, **_metrics(stage.metrics)}
    return _span(stage, stage.name, f"{conventions.SPAN_TRAIN_STAGE} {stage.name}", attributes)


def _ids(of: TrainingStep | TrainingStage) -> dict[str, Any]:
    return {
        conventions.TRAIN_RUN: of.run_id,
        conventions.TRAIN_ALGORITHM: of.algorithm,
        conventions.TRAIN_STEP_NUMBER: of.step,
        conventions.TRAIN_RESOURCES: of.resources_id,
    }


def _metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as attributes, without those that no number says."""
    return {METRIC + name: value for name, value in metrics.items() if not isinstance(value, float) or math.isfinite(value)}


def _links(step: TrainingStep, roots: Mapping[AttemptKey, Root]) -> tuple[list[tuple[AttemptKey, Root]], int]:
    """Return the links, and how many attempts have no span to link to."""
    of_rollout: dict[str, list[AttemptKey]] = {}
    for key in roots:
        of_rollout.setdefault(key[0], []).append(key)
    consumed: dict[AttemptKey, None] = {}
    for rollout_id, attempt_id in step.attempts:
        keys = [(rollout_id, attempt_id)] if attempt_id else of_rollout.get(rollout_id, [(rollout_id, "")])
        consumed.update(dict.fromkeys(keys))
    linked = [(key, roots[key]) for key in consumed if key in roots]
    return linked, len(consumed) - len(linked)


def _span(
    of: TrainingStep | TrainingStage,
    place: int | str,
    name: str,
    attributes: Mapping[str, Any],
    links: Sequence[tuple[AttemptKey, Root]] = (),
) -> bytes:
    """Serialise the span of a step, or one at another `place` (span_id_of), below it."""
    start = unix_nano(of.start_time)
    message = wire.message(
        bytes.fromhex(trace_id_of(of.run_id)),
        bytes.fromhex(span_id_of(of.run_id, of.step, place)),
        bytes.fromhex(span_id_of(of.run_id, of.step)) if place else b"",
        name,
        INTERNAL,
        start,
        max(start, unix_nano(of.end_time)),
        encodable(attributes),
        [_link(*each) for each in links],
    )
    return wire.field_of(message)


def _link(key: AttemptKey, root: Root) -> bytes:
    ids = {conventions.ROLLOUT_ID: key[0], conventions.ATTEMPT_ID: key[1]}
    return wire.link_field(bytes.fromhex(root[0]), bytes.fromhex(root[1]), ids)


def _request(spans: Sequence[bytes]) -> bytes:
    return wire.of_parts(wire.resource_head(TRAINER), wire.scope_head(""), b"".join(spans))

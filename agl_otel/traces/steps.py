"""Converts rows of sql/steps.sql, stages.sql and runs.sql to training steps, stages and runs, and derives the ids of their spans. Pure.

All steps of a run form one trace. Trace and span ids are hashes of run and step, so a step recorded twice is the same span.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from agl_otel.traces.attributes import typed
from agl_otel.types import PublishingStep, TrainingRun, TrainingStage, TrainingStep
from agl_otel_hook import conventions

NAMES: Final[Mapping[str, str]] = {
    "step": conventions.SPAN_TRAIN_STEP,
    "whole": conventions.SPAN_TRAIN_RUN,
    "outcome": conventions.TRAIN_OUTCOME,
    "stage": f"{conventions.SPAN_TRAIN_STAGE} ",
    "evidence": conventions.SPAN_TRAIN_EVIDENCE,
    "run": conventions.TRAIN_RUN,
    "algorithm": conventions.TRAIN_ALGORITHM,
    "number": conventions.TRAIN_STEP_NUMBER,
    "place": conventions.TRAIN_EVIDENCE_PLACE,
    "digest": conventions.TRAIN_DIGEST,
    "before": conventions.TRAIN_VERSION_BEFORE,
    "after": conventions.TRAIN_VERSION_AFTER,
    "resources": conventions.TRAIN_RESOURCES,
    "verdict": f"{conventions.TRAIN_METRIC}.verdict",
    "rollout_id": conventions.ROLLOUT_ID,
    "attempt_id": conventions.ATTEMPT_ID,
    "invalid": conventions.INVALID,
}
"""Values of the queries' parameters."""
METRIC: Final = f"{conventions.TRAIN_METRIC}."


def trace_id_of(run_id: str) -> str:
    """Return the trace id of a run, 32 hex digits."""
    return _hash(run_id, size=16)


def span_id_of(run_id: str, step: int, place: int | str = 0) -> str:
    """Return the id of a step's span, 16 hex digits; `place` 1, 2, … are its spans for further links, and names those of its stages."""
    return _hash(run_id, str(step), str(place), size=8)


def run_span_id_of(run_id: str) -> str:
    """Return the id of a run's own span, 16 hex digits."""
    return _hash(run_id, size=8)


def digest_of(step: TrainingStep) -> str:
    """Hash a step's versions, counts and attempts (in any order), but no times.

    So a step that was repeated with another outcome differs from one that is merely recorded again.
    """
    counts = [step.resources_id, step.version_before, step.version_after, str(step.samples), str(step.refused)]
    return _hash(*counts, *("/".join(key) for key in sorted(step.attempts)), size=8)


def steps_of(run_id: str, rows: Iterable[Mapping[str, Any]]) -> list[TrainingStep]:
    """Convert rows to steps, in order, with all of their attempts; without those that lack what a trainer records, as in stages_of."""
    steps: dict[str, TrainingStep] = {}
    attempts: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        attributes = typed(row["SpanAttributes"], row["AttrTypes"])
        # links of an earlier recording may still exist
        key = f"{attributes.get(conventions.TRAIN_STEP_NUMBER)}/{attributes.get(conventions.TRAIN_DIGEST)}"
        attempts.setdefault(key, []).extend((rollout_id, attempt_id) for rollout_id, attempt_id in row["Attempts"])
        if row["SpanName"] == conventions.SPAN_TRAIN_STEP:
            with contextlib.suppress(*_NOT_RECORDED):
                steps[key] = _step(run_id, row, attributes)
    found = [
        step.model_copy(update={"attempts": attempts[key], "unlinked": step.unlinked - len(attempts[key])}) for key, step in steps.items()
    ]
    return sorted(found, key=lambda step: step.step)


def run_of(row: Mapping[str, Any]) -> TrainingRun:
    """Convert a row of sql/runs.sql."""
    return TrainingRun(
        run_id=row["Run"],
        algorithm=row["Algorithm"],
        outcome=row["Outcome"],
        steps=int(row["Steps"]),
        last_step=int(row["LastStep"]),
        last_version=row["LastVersion"],
        promoted=int(row["Promoted"]),
        start_time=int(row["StartNano"]) / 10**9,
        end_time=int(row["EndNano"]) / 10**9,
    )


_NOT_RECORDED: Final = (KeyError, TypeError, ValueError, OverflowError)  # pydantic's error is a ValueError


def stages_of(run_id: str, rows: Iterable[Mapping[str, Any]]) -> list[TrainingStage]:
    """Convert rows of sql/stages.sql, without those that lack what a trainer records: a stack without a token takes spans of anybody."""
    found: list[TrainingStage] = []
    for row in rows:
        with contextlib.suppress(*_NOT_RECORDED):
            found.append(_stage(run_id, row))
    return found


def _stage(run_id: str, row: Mapping[str, Any]) -> TrainingStage:
    attributes = typed(row["SpanAttributes"], row["AttrTypes"])
    return TrainingStage(name=attributes[conventions.TRAIN_STAGE], **_shared(run_id, row, attributes))


def publishing_step_of(row: Mapping[str, Any]) -> PublishingStep:
    """Convert a row of sql/publishing_steps.sql."""
    texts = {"run_id": row["Run"], "algorithm": row["Algorithm"], "verdict": row["Verdict"]}
    return PublishingStep(**texts, step=int(row["Step"]), version_before=row["Before"], version_after=row["After"])


def _step(run_id: str, row: Mapping[str, Any], attributes: Mapping[str, Any]) -> TrainingStep:
    """Convert a step; `unlinked` is the number of consumed attempts until `steps_of` subtracts the linked ones."""
    return TrainingStep(
        version_before=attributes[conventions.TRAIN_VERSION_BEFORE],
        version_after=attributes[conventions.TRAIN_VERSION_AFTER],
        samples=int(attributes[conventions.TRAIN_SAMPLES]),
        refused=int(attributes[conventions.TRAIN_REFUSED]),
        unlinked=int(attributes[conventions.TRAIN_ATTEMPTS]),
        **_shared(run_id, row, attributes),
    )


def _shared(run_id: str, row: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what steps and stages share."""
    start, duration = int(row["StartNano"]), int(row["Duration"])
    return {
        "run_id": run_id,
        "algorithm": attributes[conventions.TRAIN_ALGORITHM],
        "step": int(attributes[conventions.TRAIN_STEP_NUMBER]),
        "resources_id": attributes[conventions.TRAIN_RESOURCES],
        "start_time": start / 10**9,
        "end_time": (start + duration) / 10**9,
        "metrics": {key.removeprefix(METRIC): value for key, value in attributes.items() if key.startswith(METRIC)},
    }


def _hash(*names: str, size: int) -> str:
    return hashlib.blake2b("\0".join(names).encode(), digest_size=size, person=b"agl-train-step").hexdigest()

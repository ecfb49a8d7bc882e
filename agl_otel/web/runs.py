"""REST under /v1/agl: views of runs, their steps and cycles, and of the steps that published versions of resources."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

from aiohttp import web
from pydantic import Field

from agl_otel.adapters.cycles import Cycle, cycles_of
from agl_otel.adapters.losses import CUT, LOSSES, recorded_losses, refused_in
from agl_otel.algorithms.run_folder import OTHER_CODE
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.store import Store
from agl_otel.traces.figures import AttemptFigures, CurvePoint
from agl_otel.types import Model, PublishingStep, Run, TrainingRun, TrainingStep
from agl_otel.web.curves import Curves
from agl_otel.web.routes import PageOf, Route, Strict, params_of, require_found

CURVES: Final = web.AppKey("curves", Curves)
FIGURES: Final = 1_000
"""Rollouts in one request."""
MOST_RUNS: Final = 10_000
MOST_STEPS: Final = 10_000
VERDICT_ROLLOUTS: Final = 256
_PROCESS: Final = re.compile(r"^process [^\s:]+")


class Curve(Model):
    """Rewards and costs of a run by step."""

    run: Run
    by: str
    """`step`; or `order` if rollouts name no steps: each point is then a hundredth of the rollouts, in order of creation."""
    points: list[CurvePoint]
    seconds_old: float


class Verdicts(Model):
    """Verdicts of a run's most recently ended rollouts, by their latest attempts."""

    of: int
    counts: dict[str, int]
    alarms: int
    missing: int
    reasons: dict[str, int]
    """The five most frequent reasons of attempts that are not complete."""


class StepLosses(Model):
    """What a step of a training run lost on its way from rollouts to samples, and whether it ran with other code than the first ones."""

    step: int
    rollouts: int
    samples: int
    """Trained on."""
    rollouts_without_sample: int
    groups_gone: int
    """Groups of which no rollout gave a sample."""
    replies_cut: int
    """Replies that ended at their token limit; they are trained on, and no part of `lost`."""
    refused: dict[str, float]
    """Calls and attempts by the reason for which they were refused."""
    lost: str
    """What was lost, in words; empty where nothing was."""
    other_code: str
    """The code with which the step ran, and the run was not begun (`agl-otel train --force`); empty where there is none."""


class Linked(Model):
    """An attempt that a step of a training run consumed."""

    rollout_id: str
    attempt_id: str


class _RunQuery(Strict):
    run: str


class _TrainingQuery(Strict):
    run: str = ""


class _SetQuery(Strict):
    resources_id: str


class _OfStep(Strict):
    run: str
    step: int
    limit: int = Field(default=FIGURES, ge=0, le=FIGURES)
    offset: int = Field(default=0, ge=0, le=1 << 31)


async def _runs(store: Store, request: web.Request) -> Any:
    await store.open()
    return await store.queue.query_runs()


async def _curve(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _RunQuery)
    await store.open()
    run = require_found(next(iter(await store.queue.query_runs(params.run)), None), f"run {params.run!r}")
    curve, seconds_old = await request.app[CURVES].of(run)
    if params.run and (trained := await store.reader.runs(1, run_id=params.run)):
        curve = curve.of_training(trained[0])
    return Curve(run=run, by=curve.by, points=curve.points, seconds_old=round(seconds_old, 1))


async def _training(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _TrainingQuery)
    await store.open()
    return await store.reader.runs(MOST_RUNS, run_id=params.run)


async def _steps(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _RunQuery)
    await store.open()
    return [_losses_of(step) for step in await store.reader.steps(params.run, version="")]


def _losses_of(step: TrainingStep) -> StepLosses:
    counts = {name: int(step.metrics.get(name) or 0) for name in ("rollouts", *LOSSES, CUT)}
    refused, lost = refused_in(step.metrics), recorded_losses(step.metrics)
    other = step.metrics.get(OTHER_CODE, "")
    return StepLosses(step=step.step, samples=step.samples, **counts, refused=refused, lost=lost, other_code=other)


async def _cycles(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _RunQuery)
    await store.open()
    return cycles_of(await store.reader.steps(params.run), await store.reader.stages(params.run))


async def _step_attempts(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _OfStep)
    await store.open()
    steps = await store.reader.steps(params.run)
    step = require_found(next((each for each in steps if each.step == params.step), None), f"step {params.step} of run {params.run!r}")
    page = step.attempts[params.offset : params.offset + params.limit]
    items = [Linked(rollout_id=rollout_id, attempt_id=attempt_id) for rollout_id, attempt_id in page]
    return PageOf[Linked](items=items, limit=params.limit, offset=params.offset, total=len(step.attempts))


async def _verdicts(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _RunQuery)
    await store.open()
    ended = await store.queue.query_rollouts(run=params.run, status_in=sorted(FINISHED), sort_order="desc", limit=VERDICT_ROLLOUTS)
    figures = await figures_of(store, [rollout.rollout_id for rollout in ended])
    verdicts = [each.verdict for each in figures]
    reasons = Counter(_PROCESS.sub("a process", reason) for verdict in verdicts for reason in verdict.reasons)
    return Verdicts(
        of=len(verdicts),
        counts=dict(Counter(verdict.kind for verdict in verdicts)),
        alarms=sum(verdict.alarm for verdict in verdicts),
        missing=sum(verdict.missing for verdict in verdicts),
        reasons=dict(reasons.most_common(5)),
    )


async def _publishing_steps(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _SetQuery)
    await store.open()
    return await store.reader.publishing_steps(params.resources_id, MOST_STEPS)


async def figures_of(store: Store, rollout_ids: list[str]) -> list[AttemptFigures]:
    """Return the figures of these rollouts' latest attempts."""
    attempts = await store.queue.query_attempts(rollout_ids, latest_only=True) if rollout_ids else []
    return await store.reader.figures(list(attempts))


RUNS: Final = (
    Route("GET", "/runs", _runs, "Runs, the latest first, with their rollouts by status.", None, list[Run]),
    Route("GET", "/runs/curve", _curve, "Rewards and costs of a run by step.", _RunQuery, Curve),
    Route(
        "GET", "/runs/training", _training, "Training runs, the latest first, or one: steps and outcome.", _TrainingQuery, list[TrainingRun]
    ),
    Route(
        "GET",
        "/runs/steps",
        _steps,
        "What each step of a training run lost, and other code than the run was begun with.",
        _RunQuery,
        list[StepLosses],
    ),
    Route(
        "GET",
        "/runs/cycles",
        _cycles,
        "The cycles of a run of `agl-otel improve`, with the one under way.",
        _RunQuery,
        list[Cycle],
    ),
    Route("GET", "/runs/steps/attempts", _step_attempts, "The attempts that a step of a training run consumed.", _OfStep, PageOf[Linked]),
    Route("GET", "/runs/verdicts", _verdicts, "Verdicts of a run's most recently ended rollouts.", _RunQuery, Verdicts),
    Route(
        "GET",
        "/runs/steps/publishing",
        _publishing_steps,
        "Steps of training runs by which versions of a set of resources were published, the latest first.",
        _SetQuery,
        list[PublishingStep],
    ),
)

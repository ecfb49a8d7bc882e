"""REST under /v1/agl/reviews: what is to be reviewed next, by which rubrics, how far reviewers agree. Reviews are POSTed as feedback."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import combinations
from typing import Annotated, Any, Final, Literal, NamedTuple

from aiohttp import web
from pydantic import Field

from agl_otel.adapters.reviews import agreement, disagreements, last_verdicts, shuffled
from agl_otel.errors import UsageError
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.store import Store
from agl_otel.traces.reviews import read_mean_logprobs, read_reviews
from agl_otel.types import TAKEN_VERDICTS, AttemptedRollout, Model
from agl_otel.types.columns import AttemptKey
from agl_otel.types.reviews import Agreement, Review, Rubric
from agl_otel.types.selections import Selected
from agl_otel.web.routes import Route, Strict, body_of, params_of

SEARCHED: Final = 5_000
"""Rollouts that a queue is made of: those that were enqueued last, of those that have ended (and of a run)."""
QUEUED: Final = 1_000
READ_REVIEWS: Final = 100_000
"""Of the searched rollouts: the latest ones."""
COMPARED_REVIEWS: Final = 20_000
"""Under a rubric: the latest ones."""
REVIEWERS: Final = 10
_Named = Annotated[str, Field(min_length=1, max_length=500)]


class QueuedReview(Model):
    """An attempt to review."""

    rollout_id: str
    attempt_id: str
    why: str
    """Why it was chosen; empty for a random one."""


class ReviewQueue(Model):
    """Attempts that a reviewer has not reviewed under a rubric, in the order in which they are to be."""

    items: list[QueuedReview]
    total: int
    """How many there are, before `limit`."""
    reviewed: int
    """How many of the attempts of the rule the reviewer has reviewed."""
    searched: int
    """Number of rollouts that were searched."""
    ended: int
    """Number of rollouts that have ended, of the run, or of attempts of the selection."""


class Reviewer(Model):
    """Who has reviewed under a rubric."""

    reviewer: str
    reviews: int


class Agreements(Model):
    """The agreement of each two reviewers under a rubric."""

    rubric: str
    reviewers: list[Reviewer]
    """The REVIEWERS with most reviews among those that were asked for, or among all."""
    pairs: list[Agreement]


class _Queue(Strict):
    rule: Literal["random", "selected", "disagreeing", "low_logprob", "refused"] = "random"
    """`selected`: in the order of the selection, with what failed or what it is worth. `disagreeing`: sources of feedback differ under one
    rubric, the widest first. `low_logprob`: the lowest mean log-prob first. `refused`: failed, or with a verdict that training does not
    take, the latest first."""
    reviewer: _Named
    rubric: _Named
    """As feedback names it (`tone@2`)."""
    run: str | None = None
    selection: str | None = None
    """Only the attempts of this selection, NAME or NAME@VERSION, instead of those that were enqueued last."""
    seed: str = Field(default="", max_length=100)
    """Of `random`: the same seed is the same order for all reviewers."""
    limit: int = Field(default=QUEUED, ge=0, le=SEARCHED)


class _Agreement(Strict):
    rubric: _Named
    reviewer_in: list[_Named] = Field(default_factory=list[str], max_length=REVIEWERS)
    """Only these; default: those with most reviews."""


class _GivenRubric(Strict):
    name: str
    text: str
    """Its labels are the lines `label = reward`, or `label =` for one without a reward."""


class _Ended(NamedTuple):
    """The attempts that a rule chooses from: the latest of each rollout, the latest rollout first."""

    rollouts: Mapping[AttemptKey, AttemptedRollout]
    reviews: Sequence[Review]
    selected: Sequence[Selected]
    """The rows of the selection, if one was asked for."""

    @property
    def ids(self) -> list[str]:
        return [rollout_id for rollout_id, _ in self.rollouts]


async def _random(_: Store, ended: _Ended, seed: str) -> dict[AttemptKey, str]:
    return dict.fromkeys(shuffled(ended.rollouts, seed), "")


async def _selected(_: Store, ended: _Ended, __: str) -> dict[AttemptKey, str]:
    return {row.key: row.cluster or ("" if row.value is None else f"value {row.value:.3g}") for row in ended.selected}


async def _disagreeing(_: Store, ended: _Ended, __: str) -> dict[AttemptKey, str]:
    return disagreements(ended.reviews)


async def _low_logprob(store: Store, ended: _Ended, _: str) -> dict[AttemptKey, str]:
    found = await read_mean_logprobs(store.reader, ended.ids)
    return {key: f"mean log-prob {mean:.3f} of {tokens} tokens" for key, (mean, tokens) in found.items()}


async def _refused(store: Store, ended: _Ended, _: str) -> dict[AttemptKey, str]:
    figures = await store.reader.figures([rollout.attempt for rollout in ended.rollouts.values()])
    why: dict[AttemptKey, str] = {}
    for each in figures:
        key = (each.rollout_id, each.attempt_id)
        status, verdict = ended.rollouts[key].status, each.verdict
        if status != "succeeded":
            why[key] = f"the rollout {status}"
        elif verdict.kind not in TAKEN_VERDICTS:
            why[key] = f"{verdict.kind}: {'; '.join(verdict.reasons)}"
    return why


RULES: Final[dict[str, Callable[[Store, _Ended, str], Awaitable[dict[AttemptKey, str]]]]] = {
    "random": _random,
    "selected": _selected,
    "disagreeing": _disagreeing,
    "low_logprob": _low_logprob,
    "refused": _refused,
}
"""{rule: its attempts in order, each with why it was chosen}."""


async def _queue(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _Queue)
    await store.open()
    selection = await store.selection(params.selection) if params.selection else None
    if selection is None and params.rule == "selected":
        raise UsageError("the rule `selected` is of a selection: name one (selection=NAME)")
    named = selection.rollout_ids[:SEARCHED] if selection is not None else None
    found = await store.queue.query_rollouts(
        status_in=sorted(FINISHED), rollout_id_in=named, run=params.run or None, sort_order="desc", limit=SEARCHED
    )
    rollouts = {(each.rollout_id, each.attempt.attempt_id): each for each in found if isinstance(each, AttemptedRollout)}
    rows = selection.rows if selection is not None else []
    rollouts = {key: rollouts[key] for key in {row.key for row in rows} & rollouts.keys()} if selection is not None else rollouts
    ids = [rollout_id for rollout_id, _ in rollouts]
    reviews = await read_reviews(store.reader, rollouts=ids, limit=READ_REVIEWS) if ids else []
    chosen = await RULES[params.rule](store, _Ended(rollouts, reviews, rows), params.seed) if ids else {}
    done = {(each.rollout_id, each.attempt_id) for each in reviews if (each.source, each.rubric) == (params.reviewer, params.rubric)}
    left = [
        QueuedReview(rollout_id=key[0], attempt_id=key[1], why=why) for key, why in chosen.items() if key in rollouts and key not in done
    ]
    return ReviewQueue(
        items=left[: params.limit],
        total=len(left),
        reviewed=sum(key in rollouts for key in done & chosen.keys()),
        searched=len(found),
        ended=len(rows) if selection is not None else found.total,
    )


async def _agreement(store: Store, request: web.Request) -> Any:
    params = await params_of(request, _Agreement)
    await store.open()
    names = sorted(set(params.reviewer_in))
    verdicts = last_verdicts(await read_reviews(store.reader, rubric=params.rubric, sources=names, limit=COMPARED_REVIEWS))
    asked = names or sorted(sorted(verdicts), key=lambda name: -len(verdicts[name]))[:REVIEWERS]
    return Agreements(
        rubric=params.rubric,
        reviewers=[Reviewer(reviewer=name, reviews=len(verdicts.get(name, ()))) for name in asked],
        pairs=[agreement((a, b), verdicts.get(a, {}), verdicts.get(b, {})) for a, b in combinations(asked, 2)],
    )


async def _rubrics(store: Store, _: web.Request) -> Any:
    return await store.rubrics()


async def _put_rubric(store: Store, request: web.Request) -> Any:
    given = await body_of(request, _GivenRubric)
    return await store.put_rubric(given.name, given.text)


REVIEWS: Final = (
    Route("GET", "/reviews/queue", _queue, "Attempts that a reviewer has not reviewed under a rubric, by a rule.", _Queue, ReviewQueue),
    Route("GET", "/reviews/agreement", _agreement, "Cohen's kappa of each two reviewers under a rubric.", _Agreement, Agreements),
    Route("GET", "/reviews/rubrics", _rubrics, "Current versions of rubrics.", None, list[Rubric]),
    Route("POST", "/reviews/rubrics", _put_rubric, "Store a rubric, or its next version.", _GivenRubric, Rubric, 201),
)
"""The routes of reviews."""

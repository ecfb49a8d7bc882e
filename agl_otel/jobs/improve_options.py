"""[improve] of a job file: when a cycle begins, what its gate asks for, and how a canary is judged; and what does not go together."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, Field

from agl_otel.adapters.gates import LEAST_RATED
from agl_otel.algorithms.options import MONTH_SECONDS, STRICT
from agl_otel.types import LLM
from agl_otel.types.resources import OWNER

if TYPE_CHECKING:
    from agl_otel.jobs.job import Job

Age = Annotated[float, Field(ge=1, le=12 * MONTH_SECONDS, description="it is a time in seconds")]
Drift = Annotated[float, Field(gt=0, le=100, description='it is a divergence in nats for each token, unless "off"')]
Share = Annotated[float, Field(gt=0, le=0.9, description="it is a share of the conversations")]
SEARCHES: Final = frozenset({"apo", "gepa", "random_search"})
"""The algorithms by which prompts are improved; the others improve weights."""
NO_IMPROVE: Final = "the table [improve] is missing: it must be given, and may be empty (docs/improving.md)"
RESERVED: Final = frozenset({"promoted", OWNER})
"""Names of the set `production`."""
MOST_STEPS: Final = 10
"""Of a canary. Each needs its rewards, and the bounds of each are wider, the more there are."""


def _rising(given: float | list[float]) -> float | list[float]:
    if isinstance(given, list) and not (given and all(one < other for one, other in itertools.pairwise(given))):
        raise ValueError("each share must be greater than the one before, so that its conversations stay; name at least one")
    if isinstance(given, list) and len(given) > MOST_STEPS:
        raise ValueError(f"a canary has at most {MOST_STEPS} steps; name fewer shares")
    return given


class ImproveSpec(BaseModel):
    """[improve]: from the traffic of a running product to better weights or prompts, and back (docs/improving.md)."""

    model_config = STRICT

    attempts: Annotated[int, Field(ge=2, le=100_000, description="a cycle learns from so many rated attempts")] = 128
    """A cycle begins when so many rated attempts are there that no earlier cycle had."""
    window_seconds: Age = 604_800.0
    """Attempts that began longer ago are too old."""
    max_promotions: Annotated[int, Field(ge=0, le=1000, description="the weights have changed so often since an attempt")] = 4
    """Attempts that began before that many promotions are too old, too."""
    held_out: Literal["off", "not_worse", "better"] = "not_worse"
    """What the score of [data] val must be: not lower by more than chance (95 %), or higher by more than chance."""
    backtest: Literal["off", "not_worse", "better"] = "not_worse"
    """Likewise what the cycle's attempts say of it (backtesting.md)."""
    max_drift: Drift | Literal["off"] = 1.0
    """The greatest mean divergence of a reply's tokens from the weights that answered the cycle's attempts; "off": it is not asked."""
    reward_sources: list[str] | None = None
    """With a search for prompts: sources of the rewards and corrections that count; None: all. `grpo` and `sft` name theirs in
    [algorithm]."""
    trusted_sources: list[str] = Field(default_factory=list)
    """Sources of rewards that are never trained on, and watch those that are: graders, reviewers. Needs `reward_sources` of [algorithm]."""
    trusted_rated: Annotated[int, Field(ge=LEAST_RATED, le=100_000, description="so many attempts of a cycle have a trusted reward")] = 32
    """With `trusted_sources` a cycle also waits until so many of its attempts that are not trained on have a reward of theirs."""
    canary: Annotated[Share | list[Share], AfterValidator(_rising)] = 0.1
    """The share of conversations that new weights answer first, or several rising ones, [0.05, 0.3]: the canary's steps, each of which
    is judged by rewards of its own."""
    canary_rated: Annotated[int, Field(ge=2, le=100_000, description="a canary is judged by so many rewards")] = 32
    """Rewards after which a step of the canary is passed, and after the last one it is promoted, if nothing speaks against it. One that is
    worse by more than chance goes before."""
    canary_most: Annotated[int, Field(ge=2, le=10_000_000, description="a canary answers so many conversations at most")] = 256
    """Conversations that a canary takes in a step. A proxy gives new weights no more; new prompts get more until it is noticed, within
    seconds."""
    canary_wait_seconds: Annotated[float, Field(ge=0, le=1e7, description="a full canary waits so long for rewards")] = 600.0
    """How long a step of new weights that has taken all its conversations waits for their rewards, before it is rolled back without
    them. One of new prompts does not wait, for it would go on taking conversations."""
    max_drop: Annotated[float, Field(ge=0, le=1e9, description="it is a difference of mean rewards")] = 0.05
    """By how much the canary's mean reward may be lower than the promoted weights' of the same time; and the trusted rewards of the logged
    attempts, by the lower end of their 80 % interval."""

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of the canary's steps."""
        return tuple(self.canary) if isinstance(self.canary, list) else (self.canary,)


def problems_of(job: Job) -> list[str]:
    """Return why a job cannot be improved as its [improve] says, a line for each reason."""
    spec = job.improve
    if spec is None:
        return []
    found = _of_prompts(job, spec) if job.algorithm.get("name") in SEARCHES else _of_weights(job, spec)
    if spec.canary_most < spec.canary_rated:
        found.append(
            f"[improve] canary_most = {spec.canary_most}: so many conversations cannot get canary_rated = {spec.canary_rated} rewards; not "
            "every user rates: allow twice as many, or more"
        )
    return found


def _of_weights(job: Job, spec: ImproveSpec) -> list[str]:
    found: list[str] = []
    trained, trusted = job.options.get("reward_sources") or (), spec.trusted_sources
    if spec.reward_sources is not None:
        found.append("[improve] reward_sources are for searches for prompts: name them in reward_sources of [algorithm]")
    if trusted and not trained:
        found.append("[improve] trusted_sources watch other rewards: name those to train on in reward_sources of [algorithm]")
    if both := sorted(set(trusted) & set(trained)):
        found.append(f"[improve] trusted_sources and [algorithm] reward_sources both name {both}: leave it out of one")
    return found


def _of_prompts(job: Job, spec: ImproveSpec) -> list[str]:
    found: list[str] = []
    if (llms := sum(isinstance(each, LLM) for each in job.resources.values())) != 1 and not job.has_wrong("[resources]"):
        found.append(
            f"[resources] has {llms} LLMs: with [improve] it must have one, which answers the product's users; give it, as "
            'NAME = { resource_type = "llm", endpoint = "…", model = "…" }'
        )
    if taken := sorted(RESERVED & {*job.resources}):
        found.append(f"[resources] {', '.join(taken)}: [improve] has resources of these names of its own; choose others")
    if spec.backtest == "better":
        found.append(
            '[improve] backtest = "better": logged attempts say nothing of other prompts; leave it out, or give held_out = "better"'
        )
    if spec.trusted_sources:
        found.append(
            "[improve] trusted_sources: they watch logged attempts, which say nothing of other prompts; leave them out, and let [data] val "
            "ask for what they would"
        )
    if "max_drift" in spec.model_fields_set:
        found.append("[improve] max_drift: it is a distance of weights, and prompts have none; leave it out")
    return found

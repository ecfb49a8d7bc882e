"""The steps of a canary: each is judged by its own rewards, and a kill loses none that was passed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from agl_otel.jobs.improve_canary import CanarySteps, judged_step, seen_step
from agl_otel.jobs.improve_evidence import Arms
from agl_otel.jobs.improve_options import ImproveSpec

SPEC = ImproveSpec(canary=[0.05, 0.3], canary_rated=4, canary_most=8)
AT: dict[str, Any] = {"bounds": (0.0, 1.0), "runs": True, "over": False}


def arms(*rewards: float, begun: int = 0) -> Arms:
    return Arms(begun or len(rewards), canary=np.array(rewards), promoted=np.ones(16), mixed=0)


def killed(steps: CanarySteps) -> CanarySteps:
    """What is read again of a file."""
    return CanarySteps.of(json.loads(json.dumps(steps.as_json())))


def passed(steps: CanarySteps) -> dict[str, Any]:
    found = judged_step(SPEC, steps, arms(1, 1, 1, 1), **AT)
    assert found is not None and found["why"] == ""
    return found


@pytest.mark.parametrize(("given", "shares"), [(0.2, (0.2,)), ([0.05, 0.3], (0.05, 0.3))])
def test_a_number_is_one_step(given: float | list[float], shares: tuple[float, ...]) -> None:
    assert ImproveSpec(canary=given).shares == shares


def test_a_step_that_was_under_way_is_gone_on_with_after_a_kill() -> None:
    first = CanarySteps(SPEC.shares).published("7", 100.0)
    assert killed(first).published("7", 130.0) == killed(first), "by the rewards since it was published first"
    assert killed(first).published("8", 130.0).began == 130.0, "it was withdrawn, and is published anew"
    between = first.after(passed(first))
    assert (killed(between).share, killed(between).began, killed(between).over) == (0.3, None, False)
    second = killed(between).published("8", 200.0)
    assert (second.share, second.began, second.since, second.version) == (0.3, 200.0, 100.0, "8")
    over = killed(second.after(passed(second)))
    assert over.over
    assert [(step["share"], step["began"], step["version"]) for step in over.passed] == [(0.05, 100.0, "7"), (0.3, 200.0, "8")]


def test_a_step_waits_for_its_rewards() -> None:
    second = CanarySteps(SPEC.shares, [{"began": 1.0}]).published("8", 200.0)
    assert judged_step(SPEC, second, arms(1, 1, 1, begun=8), **AT) is None
    assert judged_step(SPEC, second, arms(), **AT) is None


@pytest.mark.parametrize(
    ("found", "more", "why"),
    [
        (arms(1, 1, 1, 0), {}, "canary_no_gain"),
        (arms(1, 1, 1, begun=8), {"over": True}, "canary_unrated"),
        (arms(1, 1, 1, 1), {"runs": False}, "canary_down"),
    ],
)
def test_each_step_may_roll_the_canary_back(found: Arms, more: dict[str, Any], why: str) -> None:
    for steps in (CanarySteps(SPEC.shares), CanarySteps(SPEC.shares, [{"began": 1.0}])):
        step = judged_step(SPEC, steps.published("8", 200.0), found, **{**AT, **more})
        assert step is not None and (step["why"], step["share"], step["rated"]) == (why, steps.share, len(found.canary))


def test_a_step_under_way_shows_its_evidence_so_far() -> None:
    second = CanarySteps(SPEC.shares, [{"began": 1.0}]).published("8", 200.0)
    seen = seen_step(second, arms(1, 5, begun=6), (0.0, 1.0))
    assert {name: seen[name] for name in ("share", "began", "version")} == {"share": 0.3, "began": 200.0, "version": "8"}
    assert (seen["begun"], seen["rated"], seen["promoted_rated"], seen["mixed"]) == (6, 2, 16, 0)
    assert (seen["mean"], seen["promoted_mean"]) == (1.0, 1.0), "within the bounds"
    assert seen_step(second, arms(begun=6), (0.0, 1.0))["mean"] is None

"""Figures of `agl-otel runs`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agl_otel.algorithms.validation import Validation
from agl_otel.cli.run_figures import RunReport, chosen_metrics, cost_of, differences, sparkline, thinned
from agl_otel.errors import UsageError
from agl_otel.jobs.run import TaskResults
from agl_otel.traces.figures import Curve, CurvePoint
from agl_otel.types import Run, TrainingRun, TrainingStep


def point(step: int, mode: str, mean: float | None, *, rewarded: int = 2) -> CurvePoint:
    counts: dict[str, Any] = {"rollouts": 2, "ended": 2, "rewarded": rewarded, "spans": 10, "errors": 1}
    rewards: dict[str, Any] = {"reward_mean": mean, "reward_std": None, "reward_min": mean, "reward_max": mean}
    return CurvePoint(step=step, mode=mode, **counts, **rewards, prompt_tokens=100, response_tokens=50)


def report(run_id: str = "a", points: list[CurvePoint] | None = None, **more: Any) -> RunReport:
    given: dict[str, Any] = {"run": None, "steps": [], "verdicts": {}, "alarms": 0, "configuration": None, **more}
    return RunReport(run_id=run_id, curve=Curve("step", points or []), **given)


@pytest.mark.parametrize(
    ("outcome", "shown"), [("error: no data", [1, 2]), ("interrupted", [1, 2]), ("", [1, 2, 3]), ("finished", [1, 2, 3])]
)
def test_a_step_that_an_ended_run_had_not_made_is_left_out(outcome: str, shown: list[int]) -> None:
    fields: dict[str, Any] = {"steps": 2, "last_step": 2, "last_version": "3", "start_time": 1.0, "end_time": 2.0}
    training = TrainingRun(run_id="a", algorithm="grpo", outcome=outcome, **fields)
    points = [point(1, "train", 0.25), point(2, "train", 0.5), point(3, "train", 1.0)]
    for by, steps in (("step", shown), ("order", [1, 2, 3])):
        curve = Curve(by, points).of_training(training)
        found = report(points=curve.points, training=training)
        assert [list(values) for values in found.series().values()] == [steps, steps]
        assert found.totals()["best_reward"] == max(each.reward_mean or 0 for each in points[: len(steps)])
        assert found.totals()["prompt_tokens"] == 300, "they were read all the same"


def step(number: int, **metrics: Any) -> TrainingStep:
    return TrainingStep(run_id="a", algorithm="grpo", step=number, start_time=5.0 + number, end_time=6.0 + number, metrics=metrics)


def test_rewards_are_means_over_rollouts_separate_for_validation() -> None:
    found = report(
        points=[point(1, "train", 0.0), point(1, "", 1.0, rewarded=6), point(1, "val", 0.5), point(2, "train", None, rewarded=0)]
    )
    assert found.series() == {"reward": {1: 0.75}, "val_reward": {1: 0.5}, "tokens": {1: 450, 2: 150}}
    assert (found.totals()["last_reward"], found.totals()["prompt_tokens"], found.totals()["errors"]) == (0.75, 400, 4)


def test_tries_are_no_part_of_a_steps_reward() -> None:
    """As of the demo, which runs its agent before and after the training as a command, too."""
    points = [point(0, "test", 1.0), point(1, "train", 0.25), point(1, "test", 1.0), point(2, "test", 0.75)]
    assert report(points=points).series()["reward"] == {1: 0.25}
    assert report(points=[point(1, "test", 0.75)]).series()["reward"] == {1: 0.75}


def test_a_validation_rollout_without_reward_counts_as_0_as_in_a_jobs_score() -> None:
    """41 right of 128, of which 100 have a reward; in two points of one step."""
    points = [point(0, "val", 40 / 120).model_copy(update={"ended": 120, "rewarded": 98}),
              point(0, "val", 1 / 8).model_copy(update={"ended": 8, "rewarded": 2})]  # fmt: skip
    found = report(points=points)
    assert found.series()["val_reward"] == {0: pytest.approx(41 / 128)}
    assert (found.totals()["validated"], found.totals()["validated_without_reward"]) == (128, 28)
    assert TaskResults(["ro"] * 128, [1.0] * 41 + [0.0] * 59 + [None] * 28, Counter(), 0, 0.0).scored.described() == (
        "0.320 on 128 tasks (28 without a reward count as 0)"
    )


def test_a_best_validation_that_is_not_above_the_score_before_the_training_says_so() -> None:
    """An export takes the weights of the best validation, which may be worse than the model that the run began with."""

    def described(*scores: float) -> str | None:
        return report(points=[point(number, "val", score) for number, score in enumerate(scores)]).best_described()

    assert described(0.25, 0.5, 0.125) == "0.500 after step 1"
    assert described(0.25, 0.0, 0.125) == "0.125 after step 2; not above the 0.250 before the training"
    assert described(0.25, 0.25) == "0.250 after step 1; not above the 0.250 before the training"
    kept = [Validation(0, "before", 0.5, 2, 0, None), Validation(1, "step-000001", 0.25, 2, 0, "weights/1")]
    assert report(validations=kept).best_described() == "0.250 after step 1 (weights/1); not above the 0.500 before the training"
    assert report(validations=kept[1:]).best_described() == "0.250 after step 1 (weights/1)", "the score before is unknown"


def test_only_finite_numbers_of_training_steps_become_metrics() -> None:
    found = report(steps=[step(1, loss=0.5, note="x", worse=float("nan")), step(2, loss=0.25)])
    assert found.series() == {"loss": {1: 0.5, 2: 0.25}}
    assert (found.start_time, found.seconds) == (6.0, 2.0)


def test_other_code_is_said_with_the_number_of_steps_before_it() -> None:
    """From the steps in the store, else from the run's folder: an algorithm of one's own may record no steps."""
    steps = [
        step(0),
        step(1),
        step(2, other_code="grader a.py"),
        step(3, other_code="grader a.py"),
        step(4, other_code="grader a.py, agent"),
    ]
    assert report(steps=steps).other_code() == {2: "grader a.py", 4: "grader a.py, agent"}
    forced = [{"step": 2, "changed": {"grader a.py": ["1", "2"]}}, {"step": 4, "changed": {"agent": ["f", "g"]}}]
    assert report(forced=forced).other_code() == report(steps=steps).other_code() == report(steps=steps, forced=forced).other_code()
    assert report(steps=[step(1)]).other_code() == {}
    assert report(steps=[step(1)], forced=forced).as_json()["other_code"] == {2: "grader a.py", 4: "grader a.py, agent"}


def test_a_run_without_ended_rollouts_took_no_time() -> None:
    run = Run(run_id="a", rollouts=1, by_status={"queuing": 1}, by_mode={"": 1}, attempts=0, start_time=3.0)
    assert (report(run=run).start_time, report(run=run).seconds) == (3.0, 0.0)


def test_rewards_are_the_default_metrics_and_an_unknown_metric_is_named() -> None:
    looks = [report(points=[point(1, "train", 1.0)]), report(steps=[step(1, loss=1.0, reward_mean=0.5)])]
    assert chosen_metrics(looks, ()) == ["reward", "reward_mean"]
    assert chosen_metrics(looks, ("loss", "loss")) == ["loss"]
    with pytest.raises(UsageError, match="no run has a metric 'lost': there are loss, reward, reward_mean, tokens"):
        chosen_metrics(looks, ("lost",))


def test_only_options_that_differ_are_shown() -> None:
    looks = [report(configuration={"lr": 1, "group": 8}), report(), report(configuration={"lr": 1, "group": 4, "kl": None})]
    assert differences(looks) == {"group": [8, None, 4]}
    assert differences([report()]) == {}


def test_a_cost_needs_a_price() -> None:
    assert cost_of(report(points=[point(1, "", 1.0)]), (10.0, 40.0)) == pytest.approx(100 * 10e-6 + 50 * 40e-6)
    assert cost_of(report(), None) is None


def test_a_thinned_curve_keeps_its_ends() -> None:
    assert thinned([*range(100)], 5) == [0, 25, 50, 74, 99]
    assert thinned([1, 2], 5) == [1, 2]
    assert thinned([*range(100)], 3, keep={10, 49, 200}) == [0, 10, 49, 50, 99]
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█" and sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline([float(n) for n in range(1000)])) == 60

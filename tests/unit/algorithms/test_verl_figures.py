"""verl's figures have the names, the meaning and, in metrics.jsonl, the form of GRPO's."""

from __future__ import annotations

import io
import math
from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
from rich.console import Console

from agl_otel.adapters.losses import recorded_losses
from agl_otel.algorithms.grpo.report import StepReport
from agl_otel.algorithms.run_log import flat
from agl_otel.algorithms.validation import figures_of
from agl_otel.algorithms.verl.figures import (
    ShownStep,
    Update,
    as_metrics,
    is_step,
    line_of,
    not_finite_in,
    stack_figures,
    step_figures,
    validation_of,
)
from agl_otel.algorithms.verl.samples import Counts
from agl_otel.algorithms.verl.spec import Spec, sink_step, training_step
from agl_otel.cli.live import LiveSteps
from agl_otel.types.scores import Score

OF_VERL = {"actor/loss": 0.25, "actor/grad_norm": 2.0, "actor/kl_loss": 0.125, "critic/score/mean": 1.0}
COUNTS = Counts(
    rollouts=8, sampled=5, samples=6, calls=12, spans=40, sampled_calls=8, several_choices=2, cut=3, replies_cut=1,
    alarms=1, reward_total=3.0, without_reward=3, refused=Counter(no_reward=2, not_succeeded=1), breaks=Counter(process=1),
    verdicts=Counter(complete=7, incomplete=1), rewards={"1-0": [], "1-1": [1.0], "1-2": [1.0, 0.0], "1-3": [0.5, 0.5]},
)  # fmt: skip
NOT_OF_VERL = {
    *("weights_version", "next_version", "rollout_ids", "attempts", "started_at", "ended_at", "digest"),  # the recorded step has them
    *("resampled", "carried", "oldest"),  # options of GRPO's
    "matched_states",  # only with credit by states (test_verl_credit.py)
    "read_seconds",  # rollouts are read while others run
    "learning_rate",  # verl's actor/lr is that of the next step
}
"""Fields of StepReport that a step of verl does not have."""


def update(**given: Any) -> Update:
    usual: dict[str, Any] = {
        "trajectories": 4, "tokens": 30, "calls_trained": 7, "off_policy": 1, "singleton_groups": 1, "metrics": OF_VERL,
        "rollout_seconds": 2.0, "update_seconds": 0.5, "ratios": (0.5, 0.25),
    }  # fmt: skip
    return Update(**{**usual, **given})


def line(counts: Counts = COUNTS, **given: Any) -> dict[str, Any]:
    done = update(**given)
    return line_of(3, {**done.metrics, **as_metrics(step_figures(counts, done))})


def test_a_line_has_every_figure_of_grpos_report_under_its_name_and_in_its_form() -> None:
    found = line()
    missing = {each.name for each in fields(StepReport)} - set(found)
    assert missing == NOT_OF_VERL
    assert {name: found[name] for name in ("refused", "breaks", "verdicts")} == {
        "refused": {"no_reward": 2, "not_succeeded": 1},
        "breaks": {"process": 1},
        "verdicts": {"complete": 7, "incomplete": 1},
    }
    assert found["critic/score/mean"] == 1.0, "verl's own keep their names"
    names = ("step", "reward_mean", "without_reward", "rollouts_without_sample", "groups_gone", "zero_variance_groups", "singleton_groups")
    assert [found[name] for name in names] == [3, 3 / 8, 3, 3, 1, 2, 1], "a missing reward counts as 0"
    assert (found["loss"], found["gradient_norm"], found["kl"], found["not_finite"]) == (0.25, 2.0, 0.125, 0.0)
    assert (found["max_ratio_error"], found["logprob_drift"], found["worst_ratio_error"]) == (0.5, 0.5, 0.25)
    shares = {name: value for name, value in found.items() if name.endswith("_share")}
    assert shares == {
        "refused_share": 3 / 8,
        "cut_share": 0.5,
        "break_share": 1 / 6,
        "stale_share": 0.25,
        "own_sampling_share": 0,
    }


def test_the_stacks_metrics_are_those_of_grpo() -> None:
    needed: dict[str, Any] = {
        "step": 3, "weights_version": "", "next_version": "", "reward_mean": 0.0, "rollouts": 1, "model_calls": 1, "spans": 1,
        "verdicts": {}, "alarms": 0, "refused": {}, "breaks": {}, "trajectories": 1, "tokens": 1, "off_policy": 0, "loss": 0.0,
        "rollout_seconds": 0.0, "read_seconds": 0.0, "update_seconds": 0.0, "rollout_ids": [],
        "attempts": [], "started_at": 0.0, "ended_at": 0.0, "digest": "",
        "zero_variance_groups": 0, "resampled": 0, "carried": 0, "oldest": 0, "gradient_norm": 0.0, "max_ratio_error": 0.0, "kl": 0.0,
    }  # fmt: skip
    found, report = stack_figures(step_figures(COUNTS, update()), 3), StepReport(**needed)
    assert set(found) == set(report.figures)
    assert {name for name in found if name.endswith("_share")} < set(report.row), "in metrics.jsonl, too"
    assert StepReport.of_row(report.row) == report
    assert (found["step"], found["refused"]) == (3, 3)


def test_console_runs_show_and_dashboard_say_what_a_step_lost() -> None:
    words = "3 of 8 rollouts gave no sample; refused no_reward 2, not_succeeded 1; 1 whole group gone"
    shown = ShownStep.of(line())
    assert (shown.step, shown.reward_mean, shown.model_calls, shown.spans, shown.alarms, shown.seconds) == (3, 3 / 8, 12, 40, 1, 2.5)
    printed = io.StringIO()
    LiveSteps(Console(file=printed, width=400)).add(shown)
    assert printed.getvalue().strip() == (
        "step 3  reward 0.38  model calls 12  spans 40  verdicts complete 7 incomplete 1 ALARMS 1  seconds 2.50  lost "
        + words
        + "  cut 1 reply at max_tokens"
    )
    figures = step_figures(COUNTS, update())
    recorded = training_step(Spec(store="", run_id="verl-1", start=1), COUNTS, figures, 3, ("2", "3"), 1.0)
    assert recorded_losses(recorded.metrics) == words
    assert (recorded.samples, recorded.refused) == (4, 3)
    of_sinks = sink_step("verl-1", line(), 7.0)
    assert recorded.metrics == {name: value for name, value in of_sinks.metrics.items() if "/" not in name}
    assert recorded.metrics == {name: value for name, value in flat(line()).items() if "/" not in name and name != "step"}


def test_where_verl_compares_no_log_probs_there_is_no_drift() -> None:
    assert not {"max_ratio_error", "logprob_drift", "worst_ratio_error"} & set(line(ratios=None))
    assert "kl" not in line(metrics={"actor/loss": 0.0})


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"actor/loss": math.nan, "actor/grad_norm": math.inf}, "the loss is nan"),
        ({"actor/loss": 1.0, "actor/grad_norm": math.inf}, "the gradient is inf"),
        ({"actor/loss": 1.0, "actor/grad_norm": 2.0}, ""),
        ({}, ""),
    ],
)
def test_a_step_that_is_not_finite_is_named_and_counted(metrics: dict[str, float], says: str) -> None:
    assert not_finite_in(metrics) == says
    assert line(metrics=metrics)["not_finite"] == float(bool(says))


def test_a_validations_score_is_over_all_of_its_rollouts() -> None:
    alone = line_of(0, as_metrics(figures_of(Score(1.0, 4, 2))))
    assert alone == {"step": 0, "val_reward": 0.25, "val_rollouts": 4, "val_without_reward": 2}
    scored = validation_of(alone)
    assert scored is not None
    assert scored.described() == "0.250 on 4 tasks (2 without a reward count as 0)"
    assert (is_step(alone), is_step(line()), validation_of(line())) == (False, True, None)

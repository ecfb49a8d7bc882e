from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from contextlib import closing
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_otel.algorithms import VERL
from agl_otel.algorithms.grpo.options import Advantages
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.algorithms.verl.algorithm import summary_of, written
from agl_otel.algorithms.verl.bounds import BOUNDS
from agl_otel.algorithms.verl.defaults import environment, fixed, with_defaults
from agl_otel.algorithms.verl.keys import get
from agl_otel.algorithms.verl.publish import resources, sampling_by_mode
from agl_otel.algorithms.verl.samples import Rules
from agl_otel.algorithms.verl.spec import Spec, sink_step
from agl_otel.cli import main
from agl_otel.errors import SettingsError, UsageError
from agl_otel.jobs.job import Job
from agl_otel.types import RolloutConfig
from agl_otel.types.sampling import NEUTRAL

SPEC = asdict(Spec(store="host:4747", run_id="verl-1", start=2, rules=asdict(Rules())))
JOB = """
[agent]
function = "agent.py:answer"
[data]
train = "train.jsonl"
val = "val.jsonl"
[algorithm]
name = "verl"
"""


def test_given_keys_override_the_devices_defaults() -> None:
    cpu = with_defaults({"trainer": {"device": "cpu", "save_freq": 7}}, model_dir="/models/a")
    assert (get(cpu, "trainer.save_freq"), get(cpu, "actor_rollout_ref.actor.strategy")) == (7, "fsdp2")
    assert get(cpu, "actor_rollout_ref.model.path") == "/models/a"
    few = with_defaults({"trainer": {"device": "cpu"}, "actor_rollout_ref": {"rollout": {"n": 4}, "actor": {"ppo_mini_batch_size": 4}}})
    assert get(few, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu") == 16
    gpu = with_defaults({"actor_rollout_ref": {"model": {"path": "Qwen/a"}}}, model_dir=None)
    assert (get(gpu, "actor_rollout_ref.rollout.name"), get(gpu, "actor_rollout_ref.model.path")) == ("vllm", "Qwen/a")
    assert get(gpu, "actor_rollout_ref.actor.strategy") is None


def test_an_interpolation_is_left_to_verl() -> None:
    given = {"data.max_response_length": "${data.max_prompt_length}", "actor_rollout_ref.rollout.temperature": "${oc.env:HEAT}"}
    verl = VERL({**given, "actor_rollout_ref.rollout.n": "${data.train_batch_size}"})
    assert get(verl.config, "actor_rollout_ref.rollout.temperature") == "${oc.env:HEAT}"
    with pytest.raises(UsageError, match=r"rollout\.n = '\$\{data\.train_batch_size\}': give a number where trainer\.device is cpu"):
        VERL({"trainer.device": "cpu", "actor_rollout_ref.rollout.n": "${data.train_batch_size}"})


def test_what_would_be_overridden_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "node:6379")
    VERL({"actor_rollout_ref.rollout.n": 2, "trainer.device": "cpu"}).check()
    with pytest.raises(UsageError, match=r"ray_init\.num_cpus is given, and RAY_ADDRESS names a cluster, which has its own"):
        VERL({"actor_rollout_ref.rollout.n": 2, "ray_kwargs.ray_init.num_cpus": 4}).check()


@pytest.mark.parametrize(("key", "value"), [("trainer.val_before_train", True), ("trainer.test_freq", 5)])
def test_a_validation_without_tasks_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"{re.escape(key)} = {value}, and there are no tasks to validate on"):
        asyncio.run(VERL({"actor_rollout_ref.rollout.n": 2, key: value}).run(["task"]))


def test_required_keys_are_fixed(tmp_path: Path) -> None:
    config = fixed(tmp_path, SPEC, {"trainer": {"logger": "console"}}, validate=False)
    assert get(config, "trainer.logger") == ["console", "file"]
    assert get(config, "trainer.v1.trainer_mode") == "agl_otel_sync"
    assert get(config, "trainer.default_local_dir") == str(tmp_path / "checkpoints")
    assert (get(config, "trainer.val_before_train"), get(config, "trainer.test_freq")) == (False, -1)
    assert get(config, "actor_rollout_ref.rollout.calculate_log_probs") is True
    arrived = Spec.of(json.loads(json.dumps(config["agl_otel"])))
    assert (arrived.sample_rules, arrived.config, arrived.start) == (Rules(), Spec.of(SPEC).config, 2)


def test_only_runs_on_the_cpu_use_the_cpu_platform(tmp_path: Path) -> None:
    assert environment({"trainer": {"device": "cpu"}}, tmp_path)["VERL_PLATFORM"] == "cpu"
    assert "VERL_PLATFORM" not in environment({}, tmp_path)


def test_replicas_form_a_pool_with_verls_sampling_parameters() -> None:
    val = SimpleNamespace(temperature=0, top_p=1.0, top_k=-1)
    rollout: Any = SimpleNamespace(response_length=64, temperature=0.7, top_p=0.9, top_k=20, val_kwargs=val)
    sampling = sampling_by_mode(rollout)
    assert sampling["train"] == {**NEUTRAL, "temperature": 0.7, "max_tokens": 64, "top_p": 0.9, "top_k": 20}
    assert sampling["val"] == {**NEUTRAL, "temperature": 0.0, "max_tokens": 64}
    made: Any = resources(["a:1", "b:2"], "policy", sampling["val"])
    assert {name: llm.endpoint for name, llm in made.items()} == {"main_llm": "http://a:1/v1", "main_llm_2": "http://b:2/v1"}
    assert {(llm.model, llm.api_key) for llm in made.values()} == {("policy", None)}
    shown: Any = resources(["a:1"], "policy", sampling["val"], "their-key")
    assert shown["main_llm"].api_key == "their-key"


def test_the_outcome_has_scores_steps_and_samples() -> None:
    lines = [{"step": 0, "val_reward": 0.25}, {"step": 1, "samples": 9}, {"step": 2, "samples": 7, "val_reward": 0.5}]
    assert summary_of(lines) == {"score_before": 0.25, "score_after": 0.5, "steps": 2, "samples": 16}
    assert summary_of([]) == {"score_before": None, "score_after": None, "steps": 0, "samples": 0}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"config": {"data.train_files": "a.parquet"}}, "data.train_files has no place here: the data come from fit"),
        ({"config": {"trainer.v1.trainer_mode": "fast"}}, "trainer.v1.trainer_mode is 'fast': use one of sync, colocate_async"),
        ({"config": {}, "daemon_cls": object}, "VERL takes no daemon_cls: verl's own trainers run"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        VERL(**given)
    assert says in str(refused.value)


def test_numbers_that_are_not_finite_are_nan_as_in_grpos_lines(tmp_path: Path) -> None:
    """verl's file logger writes them as null."""
    (tmp_path / "metrics.jsonl").write_text('{"step":3,"data":{"actor/loss":null,"agl/rollouts":8,"agl/loss":null}}\n{"step":4')
    (line,) = written(tmp_path / "metrics.jsonl")
    assert math.isnan(line["actor/loss"]) and math.isnan(line["loss"]) and line["rollouts"] == 8
    with closing(RunFolder(tmp_path / "run", algorithm="verl", options={})) as run:
        run.metric(line)
        assert math.isnan(run.metrics(None)[0]["loss"])
    assert math.isnan(sink_step("verl-1", line, 7.0).metrics["loss"])


def test_sinks_get_common_names_and_verls_names() -> None:
    line = {"step": 3, "trajectories": 5, "reward_mean": 0.5, "refused": {"no_reward": 2, "late": 1}, "critic/score/max": 1.0, "told": "x"}
    step = sink_step("verl-1", line, 7.0)
    assert (step.run_id, step.step, step.samples, step.refused, step.end_time) == ("verl-1", 3, 5, 3, 7.0)
    assert step.metrics == {
        "trajectories": 5,
        "reward_mean": 0.5,
        "refused.no_reward": 2,
        "refused.late": 1,
        "critic/score/max": 1.0,
    }


def test_one_rollout_per_task_is_refused_for_group_estimators() -> None:
    with pytest.raises(UsageError, match=r"rollout\.n is 1, and algorithm\.adv_estimator = 'grpo'"):
        VERL({}).check()
    VERL({"actor_rollout_ref.rollout.n": 2}).check()
    VERL({"algorithm.adv_estimator": "reinforce_plus_plus"}).check()
    with pytest.raises(UsageError, match="metrics has 'paper'"):
        VERL({}, metrics=["paper"])


def test_the_old_aggregation_level_equals_the_option() -> None:
    assert VERL({"agentlightning.trace_aggregator.level": "transition"}).rules.by_call
    assert not VERL({"agentlightning.trace_aggregator.level": "transition"}, by_call=False).rules.by_call


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is here")
def test_without_the_extra_the_error_names_it() -> None:
    with pytest.raises(SettingsError, match=r"pip install 'agl-otel\[verl\]'"):
        asyncio.run(VERL({}).run(["task"]))


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is here")
def test_a_job_names_a_missing_extra_before_it_starts_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(JOB + "[algorithm.config]\n")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "job.toml"), "--data-dir", str(tmp_path / "data")])
    assert ended.value.code == 2
    assert "pip install 'agl-otel[verl]'" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_run_whose_model_has_changed_is_refused(tmp_path: Path) -> None:
    """The run's fingerprint in run.json includes the model's."""
    (tmp_path / "config.json").write_text("{}")
    verl = VERL({"actor_rollout_ref.rollout.n": 2}, model_dir=tmp_path)
    RunFolder(tmp_path / "run", algorithm="verl", options=verl.run_fingerprint(["task"], []), seed=1).close()
    RunFolder(tmp_path / "run", algorithm="verl", options=verl.run_fingerprint(["task"], []), seed=1).close()
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(UsageError, match="was begun with another model"):
        RunFolder(tmp_path / "run", algorithm="verl", options=verl.run_fingerprint(["task"], []), seed=1)


def test_a_job_with_unknown_verl_options_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB + "nonsense = 1\n[algorithm.config]\n")
    with pytest.raises(SettingsError, match=r"\[algorithm\] unknown key nonsense: leave it out \(docs/verl\.md has all keys\)$"):
        Job.load(tmp_path / "job.toml")


def test_every_option_reaches_verls_processes(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "seed": 5,
        "agent_match": "solver",
        "fill_reward": -1.0,
        "reward_name": "style",
        "by_call": True,
        "bridge": "keep",
        "strict_tools": "drop",
        "rollout_config": RolloutConfig(max_attempts=2),
        "step_timeout_seconds": 60.0,
        "ratio_error_limit": 0.5,
        "reward_sources": ["ann"],
        "reward_wait_seconds": 30.0,
        "credit": "to_go",
        "discount": 0.5,
        "state_weight": 1.0,
        "agent_baselines": True,
    }
    here = {"config", "model_dir", "run_dir", "on_step", "metrics"}  # in verl's own config, or of this process
    refused = {"trainer_cls", "daemon_cls"}
    assert set(inspect.signature(VERL).parameters) == {*given, *here, *refused}
    verl = VERL({"trainer.v1.trainer_mode": "colocate_async", "trainer.device": "cpu"}, model_dir="/models/a", **given)
    config = verl.config_of(tmp_path, verl.spec(store="host:1", run_id="verl-1", start=2), validate=True)
    arrived = Spec.of(json.loads(json.dumps(config["agl_otel"])))
    assert (arrived.store, arrived.run_id, arrived.start, arrived.trainer_mode) == ("host:1", "verl-1", 2, "colocate_async")
    assert (arrived.seed, arrived.step_seconds, arrived.ratio_error_limit, arrived.reports_version) == (5, 60.0, 0.5, True)
    assert (arrived.reward_sources, arrived.reward_wait_seconds) == (["ann"], 30.0)
    assert arrived.config == RolloutConfig(max_attempts=2)
    assert (arrived.bridge, arrived.strict_tools) == ("keep", "drop")
    advantages = Advantages(credit="to_go", discount=0.5, agent_baselines=True)
    assert arrived.sample_rules == Rules(fill_reward=-1.0, agent_match="solver", reward_name="style", by_call=True, advantages=advantages)
    assert get(config, "algorithm.adv_estimator") == "agl_credit"
    assert get(config, "actor_rollout_ref.model.path") == "/models/a"
    assert (get(config, "data.seed"), get(config, "actor_rollout_ref.rollout.seed")) == (5, 5)
    own = VERL({"data.seed": 1}, seed=5)
    config = own.config_of(tmp_path, own.spec(store="", run_id="verl-1", start=1), validate=True)
    assert (get(config, "data.seed"), get(config, "actor_rollout_ref.rollout.seed")) == (1, 5), "verl's own key is more particular"


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 20)])
def test_a_distribution_that_verl_does_not_score_is_refused(name: str, value: float) -> None:
    """It divides the logits by the temperature, and takes their whole softmax."""
    neutral = {"top_p": 1, "top_k": -1}[name]
    assert get(VERL({f"actor_rollout_ref.rollout.{name}": neutral}).config, f"actor_rollout_ref.rollout.{name}") == neutral
    with pytest.raises(UsageError, match=rf"rollout\.{name}.*{value}.*whole softmax"):
        VERL({f"actor_rollout_ref.rollout.{name}": value})


@pytest.mark.parametrize("key", BOUNDS)
def test_a_value_out_of_its_bounds_is_refused_by_name(key: str) -> None:
    for wrong in (-2, "wrong", [1]):
        with pytest.raises(UsageError, match=rf"{re.escape(key)} = "):
            VERL({key: wrong})

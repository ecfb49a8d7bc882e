from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_otel.algorithms.verl.keys import (
    LEVELS,
    MOVED,
    NO_EFFECT,
    NO_PLACE,
    ONLY,
    VALUES,
    get,
    has,
    leaves,
    merged,
    overlay,
    put,
    translate,
)
from agl_otel.errors import UsageError

OLD_CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 32, "max_prompt_length": 4096, "max_response_length": 2048},
    "actor_rollout_ref": {
        "rollout": {
            "name": "vllm",
            "mode": "sync",
            "n": 4,
            "multi_turn": {"format": "hermes"},
            "engine_kwargs": {"vllm": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}},
        },
        "actor": {"optim": {"lr": 1e-6, "warmup_style": "cosine"}, "checkpoint": {"contents": ["model"]}},
    },
    "trainer": {"logger": ["console", "wandb"], "n_gpus_per_node": 1},
    "ray_init": {"num_cpus": 8},
    "reward_model": {"enable": False},
}
"""A config for verl 0.5, in the form of Agent Lightning 0.3."""


def test_old_keys_are_translated_and_others_unchanged() -> None:
    config = translate(OLD_CONFIG).config
    assert get(config, "actor_rollout_ref.rollout.mode") == "async"
    assert get(config, "actor_rollout_ref.actor.optim") == {"lr": 1e-6, "lr_scheduler_type": "cosine"}
    assert get(config, "actor_rollout_ref.actor.checkpoint") == {"save_contents": ["model"]}
    assert get(config, "ray_kwargs.ray_init.num_cpus") == 8
    assert get(config, "actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser") == "hermes"
    assert not has(config, "reward_model")
    assert not has(config, "ray_init")


def test_dotted_keys_equal_nested_ones() -> None:
    assert translate({"data.train_batch_size": 2, "data": {"seed": 1}}).config == {"data": {"train_batch_size": 2, "seed": 1}}


@pytest.mark.parametrize("old", MOVED)
def test_each_moved_key_is_translated(old: str) -> None:
    given: dict[str, Any] = {}
    put(given, old, {"num_cpus": 3} if old == "ray_init" else 3)
    config = translate(given).config
    assert get(config, MOVED[old]) in (3, {"num_cpus": 3})
    assert not has(config, old)


def test_a_key_given_in_both_places_with_two_values_is_refused() -> None:
    with pytest.raises(UsageError, match=r"critic\.optim\.warmup_style and critic\.optim\.lr_scheduler_type are the same"):
        translate({"critic.optim.warmup_style": "cosine", "critic.optim.lr_scheduler_type": "constant"})


@pytest.mark.parametrize("key", NO_PLACE)
def test_an_unsupported_key_is_refused_with_the_alternative(key: str) -> None:
    with pytest.raises(UsageError) as refused:
        translate({key: {"enable": True} if "." not in key else "anything"})
    assert f"the key {key} has no place here: {NO_PLACE[key]}" in str(refused.value)


@pytest.mark.parametrize("key", ONLY)
def test_a_key_without_effect_is_refused_unless_it_says_what_happens_anyway(key: str) -> None:
    only, why = ONLY[key]
    assert get(translate({key: only}).config, key) == only
    other: Any = (not only) if isinstance(only, bool) else "another"
    with pytest.raises(UsageError) as refused:
        translate({key: other})
    assert str(refused.value) == f"the key {key} = {other!r} has no place here: {why}. Leave it out"


def test_a_value_that_is_not_json_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"actor_rollout_ref\.model\.path is PosixPath\('/a'\), of PosixPath: verl's config has numbers"):
        translate({"actor_rollout_ref": {"model": {"path": Path("/a")}}})
    with pytest.raises(UsageError, match=r"global_profiler\.steps is .* of float64"):
        translate({"global_profiler.steps": [1, np.float64(2)]})
    assert translate({"global_profiler.steps": (1, 2)}).config == {"global_profiler": {"steps": [1, 2]}}


@pytest.mark.parametrize("key", NO_EFFECT)
def test_a_removed_key_is_ignored_with_its_neutral_value(key: str) -> None:
    assert translate({key: NO_EFFECT[key]}).config == {}


@pytest.mark.parametrize("key", VALUES)
def test_old_values_are_translated(key: str) -> None:
    for old, new in VALUES[key].items():
        assert get(translate({key: old}).config, key) == new


@pytest.mark.parametrize("level", LEVELS)
def test_the_old_aggregation_level_becomes_an_option(level: str) -> None:
    assert translate({"agentlightning": {"trace_aggregator": {"level": level}}}).options == {"by_call": LEVELS[level]}


def test_unknown_old_options_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"agentlightning\.nonsense"):
        translate({"agentlightning": {"nonsense": 1}})
    with pytest.raises(UsageError, match="is 'turn': write transition"):
        translate({"agentlightning.trace_aggregator.level": "turn"})


# --- over verl's own config

BASE: dict[str, Any] = {
    "trainer": {"n_gpus_per_node": 8, "logger": ["console"]},
    "actor_rollout_ref": {
        "actor": {"fsdp_config": {"_target_": "verl.workers.config.FSDPEngineConfig", "param_offload": False}},
        "model": {"override_config": {}},
        "rollout": {"engine_kwargs": {"vllm": {}}},
    },
    "ray_kwargs": {"ray_init": {"num_cpus": None, "runtime_env": {"py_executable": None}}},
}


def fields_of(target: str) -> frozenset[str]:
    return frozenset({"mixed_precision"}) if target == "verl.workers.config.FSDPEngineConfig" else frozenset()


def test_an_overlay_overrides_keys_and_does_not_change_its_base() -> None:
    over = overlay(BASE, {"trainer": {"n_gpus_per_node": 1}})
    assert over["trainer"] == {"n_gpus_per_node": 1, "logger": ["console"]}
    assert BASE["trainer"]["n_gpus_per_node"] == 8


@pytest.mark.parametrize(
    "given",
    [
        {"trainer.n_gpus_per_nod": 1},
        {"actor_rollout_ref.actor.fsdp_config.param_ofload": True},
        {"nonsense": {"a": 1}},
    ],
)
def test_an_unknown_key_is_refused_by_name(given: dict[str, Any]) -> None:
    (path, _), *_ = leaves(given)
    with pytest.raises(UsageError) as refused:
        overlay(BASE, translate(given).config, fields_of=fields_of)
    assert str(refused.value).startswith(f"the key {path.partition('.')[0]}")
    assert "no place in verl 0.9.1" in str(refused.value)


def test_fields_of_a_sections_class_and_keys_of_open_sections_are_accepted() -> None:
    given = {
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser": "hermes",
        "ray_kwargs.ray_init.include_dashboard": False,
        "ray_kwargs.ray_init.runtime_env.env_vars.A": "1",
    }
    over = overlay(BASE, translate(given).config, fields_of=fields_of)
    assert all(get(over, path) == value for path, value in given.items())


def test_a_value_in_place_of_a_section_is_refused() -> None:
    with pytest.raises(UsageError, match=r"trainer is 3, and verl 0\.9\.1 has a section there"):
        overlay(BASE, {"trainer": 3})


def test_later_trees_take_precedence_in_a_merge() -> None:
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}


def test_an_empty_section_takes_no_defaults_away() -> None:
    """As where all keys of a table in a job file are commented out."""
    assert merged({"a": {"b": 1}}, {"a": {}}) == {"a": {"b": 1}}
    assert merged({"a": 1}, {"a": {}, "b": {}}) == {"a": {}, "b": {}}

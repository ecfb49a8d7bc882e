"""Translate users' configs from verl 0.5's keys to those of 0.9.1, and refuse keys that are not supported. Pure.

`translate` maps the old names; `overlay` checks every key against verl's config, so that a misspelt key is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from agl_otel.errors import UsageError

Tree = dict[str, Any]
OLD_SECTION: Final = "agentlightning"
_ACTOR: Final = "actor_rollout_ref.actor"
_ROLLOUT: Final = "actor_rollout_ref.rollout"

MOVED: Final[Mapping[str, str]] = {
    "ray_init.timeline_json_file": "ray_kwargs.timeline_json_file",
    "ray_init": "ray_kwargs.ray_init",
    f"{_ACTOR}.checkpoint.contents": f"{_ACTOR}.checkpoint.save_contents",
    "critic.checkpoint.contents": "critic.checkpoint.save_contents",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.model.fsdp_config": "critic.fsdp",
    f"{_ROLLOUT}.engine_kwargs.swap_space": f"{_ROLLOUT}.engine_kwargs.vllm.swap_space",
    f"{_ROLLOUT}.update_weights_bucket_megabytes": f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    "trainer.profile_steps": "global_profiler.steps",
    "trainer.controller_nsight_options": "global_profiler.global_tool_config.nsys.controller_nsight_options",
    "trainer.worker_nsight_options": "global_profiler.global_tool_config.nsys.worker_nsight_options",
    f"{_ACTOR}.profiler.discrete": f"{_ACTOR}.profiler.tool_config.nsys.discrete",
    f"{OLD_SECTION}.trace_aggregator.trajectory_max_prompt_length": "data.max_prompt_length",
    f"{OLD_SECTION}.trace_aggregator.trajectory_max_response_length": "data.max_response_length",
}
"""{key of verl 0.5: key of verl 0.9.1}; a key comes before the section that contains it."""

VALUES: Final[Mapping[str, Mapping[Any, Any]]] = {
    f"{_ROLLOUT}.mode": {"sync": "async"},
    f"{_ROLLOUT}.load_format": {"dummy_dtensor": "dummy", "dummy_hf": "dummy", "dummy_megatron": "dummy"},
}
"""{key: {value of verl 0.5: value of verl 0.9.1}}."""

NO_EFFECT: Final[Mapping[str, Any]] = {
    "reward_model.enable": False,
    "reward_model.launch_reward_fn_async": False,
    "custom_reward_function.path": None,
    f"{_ROLLOUT}.chat_scheduler": None,
    f"{_ROLLOUT}.use_fire_sampling": False,
    f"{_ROLLOUT}.skip_rollout": False,
    f"{_ROLLOUT}.multi_turn.max_turns": None,
    f"{_ROLLOUT}.multi_turn.interaction_config_path": None,
    f"{_ROLLOUT}.multi_turn.completion_callback": None,
    "actor_rollout_ref.model.return_last_hidden_state": False,
    "actor_rollout_ref.model.use_fused_loss": False,
    f"{OLD_SECTION}.trace_aggregator.debug": False,
}
"""{removed key: its value without effect}; with this value the key is ignored, with any other it is refused."""

_BY_AGENT: Final = "the agent runs outside and makes its own prompts, tool calls and turns"
_BY_TRACES: Final = "rewards are emitted by the agent or its grader and read from the traces"
_LONG: Final = "a call with a longer prompt is refused and counted (prompt_too_long)"
_WHOLE: Final = "verl scores tokens by the whole softmax at the temperature, so the gradient would be biased"
ONLY: Final[Mapping[str, tuple[Any, str]]] = {
    "data.tokenizer": (None, "nothing is tokenised: token ids come from the traces"),
    "data.prompt_key": ("prompt", _BY_AGENT),
    "data.reward_fn_key": ("data_source", _BY_TRACES),
    "data.tool_config_path": (None, _BY_AGENT),
    "data.function_tool_path": (None, _BY_AGENT),
    "data.return_raw_input_ids": (False, _BY_AGENT),
    "data.return_raw_chat": (True, _BY_AGENT),
    "data.return_full_prompt": (False, _BY_AGENT),
    "data.return_multi_modal_inputs": (True, _BY_AGENT),
    "data.filter_overlong_prompts": (False, _LONG),
    "data.filter_overlong_prompts_workers": (1, _LONG),
    "data.truncation": ("error", _LONG),
    "data.image_patch_size": (14, _BY_AGENT),
    "data.image_key": ("images", _BY_AGENT),
    "data.video_key": ("videos", _BY_AGENT),
    "data.audio_key": ("audios", _BY_AGENT),
    "data.apply_chat_template_kwargs": ({}, _BY_AGENT),
    "data.mm_processor_kwargs": ({}, _BY_AGENT),
    f"{_ROLLOUT}.calculate_log_probs": (True, "samples have the captured log-probs"),
    f"{_ROLLOUT}.do_sample": (True, "set the temperature"),
    f"{_ROLLOUT}.top_p": (1.0, _WHOLE),
    f"{_ROLLOUT}.top_k": (-1, _WHOLE),
    f"{_ROLLOUT}.ignore_eos": (False, "requests are made by the agent"),
    f"{_ROLLOUT}.multi_turn.enable": (False, _BY_AGENT),
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": (None, _BY_AGENT),
    f"{_ROLLOUT}.multi_turn.tool_config_path": (None, _BY_AGENT),
    f"{_ROLLOUT}.multi_turn.function_tool_path": (None, _BY_AGENT),
    f"{_ROLLOUT}.multi_turn.max_user_turns": (None, _BY_AGENT),
    f"{_ROLLOUT}.multi_turn.max_parallel_calls": (1, _BY_AGENT),
    f"{_ROLLOUT}.multi_turn.max_tool_response_length": (256, _BY_AGENT),
    f"{_ROLLOUT}.multi_turn.tool_response_truncate_side": ("middle", _BY_AGENT),
    f"{_ROLLOUT}.multi_turn.use_inference_chat_template": (False, _BY_AGENT),
    f"{_ROLLOUT}.multi_turn.tokenization_sanity_check_mode": ("strict", _BY_AGENT),
    f"{_ROLLOUT}.multi_turn.format": ("hermes", _BY_AGENT),
    f"{_ROLLOUT}.multi_turn.num_repeat_rollouts": (None, _BY_AGENT),
    "reward.reward_manager.source": ("register", _BY_TRACES),
    "reward.reward_manager.name": ("naive", _BY_TRACES),
    "reward.reward_manager.module.path": (None, _BY_TRACES),
    "reward.sandbox_fusion.url": (None, _BY_TRACES),
    "sandbox_fusion.url": (None, _BY_TRACES),
    "trainer.resume_mode": ("auto", "a run is resumed from its own folder; take another one to begin anew"),
    "trainer.use_v1": (True, "only verl's v1 trainer takes several samples for a rollout"),
    "transfer_queue.enable": (True, "verl's v1 trainer cannot be without"),
}
"""{key that would have no effect, or that a run depends on: (the only value that is accepted, the reason)}."""

_FROM_FIT: Final = "the data come from fit(agent, train, val), or [data] of a job file"
_BY_US: Final = "it is set by this algorithm"
NO_PLACE: Final[Mapping[str, str]] = {
    "data.train_files": _FROM_FIT,
    "data.val_files": _FROM_FIT,
    "data.custom_cls": _FROM_FIT,
    "data.datagen": _FROM_FIT,
    "data.sampler": "verl 0.9.1 has no samplers of the user's own; data.shuffle and data.seed are left",
    "data.format_prompt": _BY_AGENT,
    "data.need_tools_kwargs": _BY_AGENT,
    "reward_model": _BY_TRACES,
    "custom_reward_function": _BY_TRACES,
    "reward.reward_model.enable": _BY_TRACES,
    "reward.custom_reward_function": _BY_TRACES,
    f"{_ROLLOUT}.chat_scheduler": _BY_AGENT,
    f"{_ROLLOUT}.multi_turn.max_turns": _BY_AGENT,
    f"{_ROLLOUT}.multi_turn.interaction_config_path": _BY_AGENT,
    f"{_ROLLOUT}.multi_turn.completion_callback": _BY_AGENT,
    f"{_ROLLOUT}.agent.default_agent_loop": _BY_US,
    f"{_ROLLOUT}.agent.agent_loop_config_path": _BY_US,
    f"{_ROLLOUT}.agent.agent_loop_manager_class": _BY_US,
    "trainer.default_local_dir": "checkpoints lie in the run's folder: choose that (run_dir, or --run-dir)",
    "trainer.resume_from_path": "a run is resumed from its own folder: choose that (run_dir, or --run-dir)",
    f"{OLD_SECTION}.port": "the proxy is a service of the stack: set AGL_PROXY_PORT",
    f"{OLD_SECTION}.trace_aggregator.mismatch_log_dir": "calls that do not join are counted by reason in the metrics (agl/breaks/…)",
}
"""{unsupported key: the reason, with the alternative}."""

LEVELS: Final[Mapping[str, bool]] = {"transition": True, "trajectory": False}
"""{0.3's trace_aggregator.level: whether each call is a separate sample}."""


@dataclass
class Translated:
    """A translated config."""

    config: Tree = field(default_factory=Tree)
    """Keys of verl 0.9.1, nested, without defaults."""
    options: Tree = field(default_factory=Tree)
    """VERL's keyword arguments that 0.3 had in the config."""


def translate(config: Mapping[str, Any]) -> Translated:
    """Translate the keys and values of verl 0.5 and of Agent Lightning 0.3 in a user's config.

    Dotted keys (`{"data.train_batch_size": 32}`) are equivalent to nested ones. Raises UsageError that names an unsupported key.
    """
    given: Tree = {}
    for path, value in leaves(config):
        put(given, path, _plain(path, value))
    translated = Translated()
    for path, neutral in NO_EFFECT.items():
        if has(given, path) and get(given, path) in (neutral, None):
            remove(given, path)
    for path, why in NO_PLACE.items():
        if has(given, path) and get(given, path) != {}:
            raise UsageError(f"the key {path} has no place here: {why}")
    for path, (only, why) in ONLY.items():
        if has(given, path) and get(given, path) != only:
            raise UsageError(f"the key {path} = {get(given, path)!r} has no place here: {why}. Leave it out")
    level = f"{OLD_SECTION}.trace_aggregator.level"
    if has(given, level):
        word = remove(given, level)
        if word not in LEVELS:
            raise UsageError(
                f"{level} is {word!r}: write transition (a sample for each call) or trajectory (calls that continue each other are merged)"
            )
        translated.options["by_call"] = LEVELS[word]
    for old, new in MOVED.items():
        if has(given, old):
            for path, value in leaves(remove(given, old), new):
                if has(given, path) and get(given, path) != value:
                    raise UsageError(
                        f"the keys {old} and {path} are the same option, with the values {value!r} and {get(given, path)!r}: give one"
                    )
                put(given, path, value)
    for path, values in VALUES.items():
        if has(given, path) and get(given, path) in values:
            put(given, path, values[get(given, path)])
    if left := dict(leaves(given.get(OLD_SECTION, {}))):
        raise UsageError(f"the key {OLD_SECTION}.{min(left)} has no place here: options of VERL are its keyword arguments")
    translated.config = given
    return translated


def _plain(path: str, value: Any) -> Any:
    """Copy a value that can be written as JSON, as verl's process reads it. Raises UsageError, which names the key, for another one."""
    if isinstance(value, list | tuple):
        return [_plain(path, each) for each in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        return {str(key): _plain(path, each) for key, each in cast("Mapping[str, Any]", value).items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UsageError(
        f"the key {path} is {value!r}, of {type(value).__name__}: verl's config has numbers, texts, booleans, null, lists and sections; "
        "convert it"
    )


def overlay(base: Mapping[str, Any], given: Mapping[str, Any], *, fields_of: Callable[[str], frozenset[str]] | None = None) -> Tree:
    """Overlay verl's config `base` with the given keys.

    A key must exist in `base`, be a field of the class in its section's `_target_` (`fields_of` lists them by import path), or be in one of
    the sections in OPEN. Raises UsageError that names an unknown key.
    """
    result: Tree = copy.deepcopy(dict(base))
    _lay(result, given, "", fields_of or (lambda _: frozenset()))
    return result


OPEN: Final = frozenset({"ray_kwargs.ray_init", "ray_kwargs.ray_init.runtime_env", "actor_rollout_ref.model.override_config"})
"""Sections that take any key."""


def _lay(base: Tree, given: Mapping[str, Any], where: str, fields_of: Callable[[str], frozenset[str]]) -> None:
    for key, value in given.items():
        path = f"{where}.{key}" if where else key
        known = key in base
        if not known and where not in OPEN and key not in fields_of(str(base.get("_target_", ""))):
            close = f"; {where or 'the config'} has {', '.join(sorted(map(str, base)))}" if len(base) <= 40 else ""
            raise UsageError(f"the key {path} has no place in verl 0.9.1's config{close}")
        below = base.get(key)
        if isinstance(value, Mapping) and isinstance(below, dict) and below and path not in OPEN - {"ray_kwargs.ray_init"}:
            _lay(cast("Tree", below), cast("Mapping[str, Any]", value), path, fields_of)
        elif isinstance(below, dict) and below and not isinstance(value, Mapping) and value is not None:
            raise UsageError(f"{path} is {value!r}, and verl 0.9.1 has a section there: {', '.join(sorted(map(str, cast('Tree', below))))}")
        else:
            base[key] = value


def merged(*trees: Mapping[str, Any]) -> Tree:
    """Merge trees, nested or with dotted keys; later ones take precedence. An empty section changes nothing."""
    result: Tree = {}
    for tree in trees:
        for path, value in leaves(tree):
            if value != {} or not isinstance(get(result, path), dict):
                put(result, path, copy.deepcopy(value))
    return result


# --- trees by dotted path


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for each leaf; an empty section is a leaf."""
    if isinstance(tree, Mapping) and tree:
        for key, value in cast("Mapping[str, Any]", tree).items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, {} if isinstance(tree, Mapping) else tree


def has(tree: Mapping[str, Any], path: str) -> bool:
    """Return whether the tree has a value at a path."""
    held: Any = tree
    for part in path.split("."):
        if not isinstance(held, Mapping) or part not in held:
            return False
        held = cast("Mapping[str, Any]", held)[part]
    return True


def get(tree: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a path, or the default."""
    held: Any = tree
    for part in path.split("."):
        if not isinstance(held, Mapping) or part not in held:
            return default
        held = cast("Mapping[str, Any]", held)[part]
    return held


def put(tree: Tree, path: str, value: Any) -> None:
    """Set the value at a path, creating sections as needed. Raises UsageError where a section of the path is a value."""
    *sections, last = path.split(".")
    held = tree
    for section in sections:
        held = held.setdefault(section, {})
        if not isinstance(held, dict):
            raise UsageError(f"the key {path} is given, and {section} before it is no section")
    held[last] = value


def remove(tree: Tree, path: str) -> Any:
    """Remove and return the value at a path, and remove sections that this leaves empty. Raises KeyError where it is missing."""
    first, _, rest = path.partition(".")
    if not rest:
        return tree.pop(first)
    taken = remove(tree[first], rest)
    if not tree[first]:
        del tree[first]
    return taken

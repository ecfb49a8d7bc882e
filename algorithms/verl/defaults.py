"""Values that this package sets in verl's config: defaults, which users may override, and fixed ones that it depends on. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.verl.keys import Tree, get, merged, translate
from agl_otel.algorithms.verl.spec import SECTION
from agl_otel.errors import UsageError

COMMON: Final[Mapping[str, Any]] = {
    "algorithm.adv_estimator": "grpo",
    "reward.num_workers": 0,  # rewards come with the samples; each worker of verl would be a process of half a gigabyte
    "trainer.logger": ["console"],
    "trainer.project_name": "agl-otel",
    "trainer.save_freq": 1,
    "trainer.test_freq": 1_000_000,  # after the last step
    "trainer.max_actor_ckpt_to_keep": 2,
    "trainer.max_critic_ckpt_to_keep": 2,
    "ray_kwargs.ray_init.include_dashboard": False,
}
CPU: Final[Mapping[str, Any]] = {
    "actor_rollout_ref.rollout.name": "agl_otel_cpu",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.model.use_remove_padding": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.actor.use_torch_compile": False,
    "data.dataloader_num_workers": 0,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "ray_kwargs.ray_init.num_cpus": 8,  # slots for actors, which are mostly idle; independent of the machine's cores
    "ray_kwargs.ray_init.num_gpus": 1,  # stands for the CPU (cpu.py)
}
"""With `trainer.device: cpu`, for small models. Of verl's strategies only fsdp2 runs there."""
GPU: Final[Mapping[str, Any]] = {
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.generation_config": "vllm",  # not those of the model's generation_config.json
}
LOOP_FILE: Final = "agent_loop.yaml"
PLUGIN: Final = "agl_otel.algorithms.verl.plugin"
CARRIED: Final = ("WANDB_API_KEY", "HF_TOKEN", "AGL_TOKEN", "AGL_TLS_CA", "AGL_TLS_CERT", "AGL_TLS_KEY")
"""Environment variables that are passed to verl's processes on other machines."""

REQUIRED: Final = ("VERL_USE_EXTERNAL_MODULES", "VERL_FILE_LOGGER_PATH", "VERL_PLATFORM", "VERL_ENGINE_DEVICE")
"""Environment variables by which verl finds this package; a user's `ray_kwargs.ray_init.runtime_env` does not change them."""
OF_A_NEW_CLUSTER: Final = ("num_cpus", "num_gpus")
"""Arguments of ray.init that it refuses where RAY_ADDRESS names a cluster."""

SMALL_MACHINE: Final[Mapping[str, str]] = {
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_worker_prestart": "0",  # otherwise an idle process for each of `num_cpus`
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # with Ray's 15, workers starve on a busy machine
    "RAY_agent_register_timeout_ms": "180000",  # imports on busy cores may take longer than Ray's 30 s
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_worker_register_timeout_seconds": "180",
}
"""Environment variables for Ray on machines with few cores."""


def on_cpu(config: Mapping[str, Any]) -> bool:
    """Return whether a translated config selects the CPU."""
    return get(config, "trainer.device") == "cpu"


def with_defaults(config: Mapping[str, Any], *, model_dir: str | None = None) -> Tree:
    """Merge a translated config over the defaults."""
    more = {"actor_rollout_ref.model.path": model_dir} if model_dir else {}
    device = {**CPU, **_micro_batches(config)} if on_cpu(config) else GPU
    return merged(*(translate(part).config for part in (COMMON, device, more)), config)


def _micro_batches(config: Mapping[str, Any]) -> dict[str, int]:
    """Make micro-batches as large as a mini-batch: verl pads each batch to a multiple of it, which micro-batches must divide."""
    factors = {"actor_rollout_ref.actor.ppo_mini_batch_size": 256, "actor_rollout_ref.rollout.n": 1}
    size = 1
    for path, usual in factors.items():
        value = get(config, path, usual)
        if not isinstance(value, int):
            raise UsageError(
                f"{path} = {value!r}: give a number where trainer.device is cpu, because the size of micro-batches depends on it"
            )
        size *= value
    return {
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": size,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": size,
    }


def fixed(folder: Path, spec: Mapping[str, Any], config: Mapping[str, Any], *, validate: bool) -> Tree:
    """Return the fixed part of verl's config. `folder`: for the run's verl files; `config`: the user's, with defaults."""
    loggers: Any = get(config, "trainer.logger", [])
    loggers = [loggers] if isinstance(loggers, str) else list(loggers)
    result: Tree = {}
    for path, value in {
        "data.train_files": str(folder / "train.jsonl"),
        "data.val_files": str(folder / "val.jsonl"),
        "data.custom_cls.path": "pkg://agl_otel.algorithms.verl.data",
        "data.custom_cls.name": "Tasks",
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "agl_otel",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(folder / LOOP_FILE),
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.resume_mode": "auto",
        "trainer.logger": [*(name for name in loggers if name != "file"), "file"],
        "trainer.v1.trainer_mode": f"agl_otel_{spec['trainer_mode']}",
        **({} if validate else {"trainer.val_before_train": False, "trainer.test_freq": -1}),
    }.items():
        result = merged(result, _nested(path, value))
    return merged(result, {SECTION: dict(spec)})


def _nested(path: str, value: Any) -> Tree:
    first, _, rest = path.partition(".")
    return {first: _nested(rest, value) if rest else value}


def environment(config: Mapping[str, Any], metrics: Path, *, module: bool = False) -> dict[str, str]:
    """Return environment variables for the process that runs verl; its processes on this machine inherit them.

    `module`: let them import modules of the working directory.
    """
    required = {"VERL_USE_EXTERNAL_MODULES": PLUGIN, "VERL_FILE_LOGGER_PATH": str(metrics), "HYDRA_FULL_ERROR": "1"}
    defaults = {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}
    defaults["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # under `uv run` Ray refuses verl's `working_dir: None`
    if on_cpu(config):
        required |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}  # the engines that verl registers for CUDA are plain torch
        defaults |= SMALL_MACHINE
    if module:
        required["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    return {**{name: value for name, value in defaults.items() if name not in os.environ}, **required}

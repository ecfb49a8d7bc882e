"""The process that runs verl: `python -m agl_otel.algorithms.verl RUN.json`, which algorithm.py writes. Needs the extra [verl].

verl's own config, with ours over it, goes into verl's own `run_ppo`: what `python -m verl.trainer.main_ppo` does, without a command
line in between.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.run_folder import write_json
from agl_otel.algorithms.verl.defaults import CARRIED
from agl_otel.algorithms.verl.keys import Tree, get, overlay
from agl_otel.algorithms.verl.spec import SECTION
from agl_otel.errors import AglError, UsageError

OUTCOME: Final = "outcome.json"


def compose_config(given: Tree) -> Tree:
    """verl's config with `given` over it. Raises UsageError that names a key which has no place there."""
    from hydra import compose, initialize_config_module  # pyright: ignore[reportMissingImports] - of the extra [verl], as all of these
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    with initialize_config_module("verl.trainer.config", version_base=None):
        base: Any = OmegaConf.to_container(compose("ppo_trainer"), resolve=False)
    ours = {SECTION: given[SECTION]}
    return overlay(base, {key: value for key, value in given.items() if key != SECTION}, fields_of=fields_of) | ours


def fields_of(target: str) -> frozenset[str]:
    """The fields of a config class of verl's, by its import path; none where it is no dataclass."""
    module, _, name = target.rpartition(".")
    if not module.startswith("verl."):
        return frozenset()
    kind = getattr(import_module(module), name)
    return frozenset(each.name for each in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else frozenset()


def check(config: Tree, tasks: int) -> None:
    """Raise UsageError for what verl would only stumble over later."""
    batch = get(config, "data.gen_batch_size") or get(config, "data.train_batch_size")
    if batch > tasks:
        raise UsageError(f"data.train_batch_size is {batch}, and there are {tasks} tasks to train on: set it to at most that")
    if not get(config, "actor_rollout_ref.model.path"):
        raise UsageError("actor_rollout_ref.model.path is not given: name a model's folder or its name on the Hugging Face hub")


def run(given: Tree, tasks: int) -> None:
    """Train as the config says."""
    import ray  # pyright: ignore[reportMissingImports]
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env  # pyright: ignore[reportMissingImports]
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo  # pyright: ignore[reportMissingImports]
    from verl.trainer.ppo.utils import need_critic, need_reference_policy  # pyright: ignore[reportMissingImports]
    from verl.utils.config import validate_config  # pyright: ignore[reportMissingImports]
    from verl.utils.device import auto_set_device  # pyright: ignore[reportMissingImports]

    tree = compose_config(given)
    check(tree, tasks)
    config: Any = OmegaConf.create(tree)
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    # verl prints what it gives to ray.init; started here, the variables that are secret are not printed
    runtime: Any = OmegaConf.to_container(OmegaConf.merge(get_ppo_ray_runtime_env(config), config.ray_kwargs.ray_init.runtime_env))
    carried = {name: os.environ[name] for name in CARRIED if name in os.environ}
    theirs = {name: value for name, value in os.environ.items() if name.startswith("VERL_")}
    runtime["env_vars"] = {**runtime.get("env_vars", {}), "TRANSFER_QUEUE_ENABLE": "1", **theirs, **carried}
    started_elsewhere = "RAY_ADDRESS" in os.environ  # then Ray takes no sizes
    options: Any = {} if started_elsewhere else OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    ray.init(**{**options, "runtime_env": runtime})
    run_ppo(config, task_runner_class=TaskRunnerV1)


def main(path: str) -> int:
    """Run, and leave beside the file how it ended; the exit status."""
    told: Tree = json.loads(Path(path).read_text())
    outcome = Path(path).with_name(OUTCOME)
    try:
        run(told["config"], told["tasks"])
    except Exception as error:
        known = getattr(error, "cause", error)  # Ray wraps what its actors raise
        if not isinstance(known, AglError):
            raise
        write_json(outcome, {"error": type(known).__name__, "message": str(known)})
        print(f"error: {known}", file=sys.stderr)  # noqa: T201 - the end of its log
        return 2
    write_json(outcome, {"error": None})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Run verl in a process of its own: `python -m agl_otel.algorithms.verl RUN.json`; algorithm.py writes the file. Needs the extra [verl].

verl's default config, overlaid with the run's, is passed to verl's `run_ppo`, as `python -m verl.trainer.main_ppo` does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.checked_files import write_json
from agl_otel.algorithms.verl.compose import compose_config
from agl_otel.algorithms.verl.defaults import CARRIED, OF_A_NEW_CLUSTER, REQUIRED
from agl_otel.algorithms.verl.keys import Tree, get
from agl_otel.errors import AglError, UsageError

OUTCOME: Final = "outcome.json"


def check(config: Tree, tasks: int) -> None:
    """Raise UsageError for errors in the config that verl would detect late."""
    batch, most = get(config, "data.gen_batch_size") or get(config, "data.train_batch_size"), get(config, "data.train_max_samples")
    taken = tasks if most is None or most < 0 else min(tasks, most)
    if batch > taken:
        raise UsageError(f"data.train_batch_size is {batch}, and there are {taken} tasks to train on: set it to at most that")
    if not get(config, "actor_rollout_ref.model.path"):
        raise UsageError("actor_rollout_ref.model.path is not given: name a model's folder or its name on the Hugging Face hub")


def run(given: Tree, tasks: int) -> None:
    """Train with the config `given`. Raises UsageError for an invalid config, and what verl raises."""
    import ray  # pyright: ignore[reportMissingImports] - of the [verl] extra
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports] - of the [verl] extra
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env  # pyright: ignore[reportMissingImports] - of the [verl] extra
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo  # pyright: ignore[reportMissingImports] - of the [verl] extra
    from verl.trainer.ppo.utils import need_critic, need_reference_policy  # pyright: ignore[reportMissingImports] - of the [verl] extra
    from verl.utils.config import validate_config  # pyright: ignore[reportMissingImports] - of the [verl] extra
    from verl.utils.device import auto_set_device  # pyright: ignore[reportMissingImports] - of the [verl] extra

    tree = compose_config(given)
    check(tree, tasks)
    config: Any = OmegaConf.create(tree)
    auto_set_device(config)
    try:
        validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"verl refuses its config: {error}") from error
    # verl prints its arguments of ray.init; Ray is started here instead, so that secrets in `carried` are not printed
    runtime: Any = OmegaConf.to_container(OmegaConf.merge(get_ppo_ray_runtime_env(config), config.ray_kwargs.ray_init.runtime_env))
    carried = {name: os.environ[name] for name in CARRIED if name in os.environ}
    of_verl = {name: value for name, value in os.environ.items() if name.startswith("VERL_")}
    required = {"TRANSFER_QUEUE_ENABLE": "1", **{name: of_verl[name] for name in REQUIRED if name in of_verl}}
    runtime["env_vars"] = {**carried, **of_verl, **runtime.get("env_vars", {}), **required}
    options: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    if "RAY_ADDRESS" in os.environ:
        options = {name: value for name, value in options.items() if name not in OF_A_NEW_CLUSTER}
    ray.init(**{**options, "runtime_env": runtime})
    run_ppo(config, task_runner_class=TaskRunnerV1)


def main(path: str) -> int:
    """Run, write the outcome to outcome.json beside the file, and return the exit status: 0, or 2 for an error of this package."""
    content: Tree = json.loads(Path(path).read_text())
    outcome = Path(path).with_name(OUTCOME)
    try:
        run(content["config"], content["tasks"])
    except Exception as error:
        known = getattr(error, "cause", error)  # Ray wraps exceptions of its actors
        if not isinstance(known, AglError):
            raise
        write_json(outcome, {"error": type(known).__name__, "message": str(known)})
        print(f"error: {known}", file=sys.stderr)  # noqa: T201 - the last line of the process's log
        return 2
    write_json(outcome, {"error": None})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

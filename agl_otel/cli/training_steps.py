"""`agl-otel traces steps`: the lineage of versions of weights or prompts: training steps and the attempts they consumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from agl_otel.algorithms.run_folder import RUN, forced_in, read_run
from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.output import clock, counted, open_console, table_of
from agl_otel.errors import NotFoundError
from agl_otel.stack.sharing import open_store
from agl_otel.store import Store
from agl_otel.types import TrainingRun, TrainingStep


@click.command()
@click.argument("run", required=False)
@click.option("--version", help="Only the steps that made this version, with the attempts they consumed.")
@data_dir_option
@store_option
@json_option
def steps(run: str | None, version: str | None, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """List the steps of a training run with the versions of weights or prompts that they made; without RUN, list the runs.

    RUN is a run's id, which is also the id of the resources that it publishes, or its folder.
    """
    settings = settings_for(data_dir, store)
    setup_logging()

    async def main() -> None:
        async with open_store(settings) as opened:
            if run is None:
                runs = await opened.training_runs()
                print_json([each.model_dump() for each in runs]) if as_json else _show_runs(runs)
                return
            found = await steps_of(opened, run_id_of(run), version)
        print_json([each.model_dump() for each in found]) if as_json else _show_steps(found, attempts=version is not None)

    run_async(main)


async def steps_of(store: Store, run_id: str, version: str | None) -> list[TrainingStep]:
    """Return the steps of a run. Raises NotFoundError if there are none."""
    found = await store.training_steps(run_id, version=version)
    if not found:
        what = f"run {run_id} made version {version}" if version is not None else f"a run {run_id}"
        raise NotFoundError(f"no step of {what} is stored: `agl-otel traces steps` lists the runs")
    return found


def run_id_of(run: str) -> str:
    """Return the id of the run in this folder, or the id itself. Raises DataError for a damaged run.json."""
    found = _run_json(run)
    return run if found is None else str(found["run_id"])


def configuration_of(run: str) -> dict[str, Any] | None:
    """Return algorithm, seed and options of the run in this folder; options of a nested table are named `outer.inner`.

    None if `run` is not a run folder. Raises DataError for a damaged run.json.
    """
    found = _run_json(run)
    if found is None:
        return None
    return {"algorithm": found["algorithm"], "seed": found["seed"], **_flat(found["options"])}


def forced_of(run: str) -> list[dict[str, Any]]:
    """Return `forced` of the run in this folder; empty if `run` is none. Raises DataError for a damaged run.json."""
    return forced_in(Path(run))


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _run_json(run: str) -> dict[str, Any] | None:
    path = Path(run) / RUN
    if not path.exists():
        return None
    return read_run(path)


def _show_runs(runs: Sequence[TrainingRun]) -> None:
    rows = [(each.run_id, each.algorithm, each.steps, each.last_version, clock(each.start_time), clock(each.end_time)) for each in runs]
    open_console().print(table_of(counted(len(runs), "run"), ("run", "algorithm", "steps", "version", "began", "last step"), rows))


def _show_steps(steps: Sequence[TrainingStep], *, attempts: bool) -> None:
    columns = ("step", "from version", "to version", "ended", "reward", "samples", "refused", "attempts")
    rows = [
        (
            each.step,
            each.version_before,
            each.version_after,
            clock(each.end_time),
            each.metrics.get("reward_mean"),
            each.samples,
            each.refused,
            f"{len(each.attempts)}" + (f" (and {each.unlinked} without spans)" if each.unlinked else ""),
        )
        for each in steps
    ]
    open_console().print(table_of(steps[0].run_id, columns, rows))
    if attempts:
        found = [(each.step, *key) for each in steps for key in each.attempts]
        open_console().print(table_of("attempts", ("step", "rollout", "attempt"), found))

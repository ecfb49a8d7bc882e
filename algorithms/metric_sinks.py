"""Where the figures of a run's steps are shown, beside the console and metrics.jsonl: TensorBoard, Weights & Biases, a picture.

A sink is a MetricSink; `SINKS` has ours by name. All get the same: every number of a TrainingStep's metrics, whatever the algorithm.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, Final, Protocol

from agl_otel.algorithms.run_folder import read_sealed, sealed, write_json
from agl_otel.errors import SettingsError, UsageError
from agl_otel.types import TrainingStep

TENSORBOARD: Final = "tensorboard"
WANDB: Final = "wandb.json"
PICTURE: Final = "plots.png"
DRAWN_EVERY_STEPS: Final = 25  # half a second of CPU each; and once at the end
NO_STEP: Final = -1
Sinks = Sequence[Any]
"""Names of SINKS, and objects that are a MetricSink."""


class MetricSink(Protocol):
    """Takes the figures of one run. What it raises in `begin` ends the run; in `step`, the sink."""

    def begin(self, run_id: str, folder: Path | None, done: Sequence[TrainingStep]) -> None:
        """A run starts, or goes on after the steps in `done`; `folder` is the run's. What was shown of later steps is to be forgotten."""
        ...

    def step(self, step: TrainingStep) -> None:
        """A step is done. A search for prompts that goes on tells its steps again."""
        ...

    def close(self) -> None:
        """The run ends, for whatever reason."""
        ...


class TensorBoard:
    """Event files in the run's folder. Written anew when a run goes on, so that no step is in them twice."""

    def begin(self, run_id: str, folder: Path | None, done: Sequence[TrainingStep]) -> None:
        """Begin with what is done."""
        with _without_torch():
            from tensorboardX import SummaryWriter

        assert folder is not None
        for old in (folder / TENSORBOARD).glob("events.*"):
            old.unlink()
        self._writer: Any = SummaryWriter(str(folder / TENSORBOARD))
        for step in done:
            self.step(step)

    def step(self, step: TrainingStep) -> None:
        """One scalar for each number; what is counted by name has a group of its own."""
        for name, value in numbers(step).items():
            self._writer.add_scalar(name.replace(".", "/"), value, step.step, walltime=step.end_time)
        self._writer.flush()

    def close(self) -> None:
        """Have it on disk."""
        self._writer.close()


@contextlib.contextmanager
def _without_torch() -> Generator[None]:
    """Within the block this thread imports no torch that is not there yet.

    tensorboardX imports it for a type hint: 400 MB and seconds, of which a search for prompts has no use.
    """
    me = threading.get_ident()

    class Refusing(MetaPathFinder):
        def find_spec(self, fullname: str, path: object, target: object = None) -> None:
            if fullname == "torch" and threading.get_ident() == me:
                raise ModuleNotFoundError("not now", name=fullname)

    refusing = Refusing()
    sys.meta_path.insert(0, refusing)
    try:
        yield
    finally:
        sys.meta_path.remove(refusing)


class WandB:
    """A run of Weights & Biases with the run's id. Project, mode and key are those of its own environment variables (WANDB_…).

    What was sent is noted in wandb.json, so that a run that goes on sends no step twice.
    """

    def begin(self, run_id: str, folder: Path | None, done: Sequence[TrainingStep]) -> None:
        """Open the run, and send what it lacks."""
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        assert folder is not None
        self._cursor = folder / WANDB
        self._sent: int = read_sealed(self._cursor)["step"] if self._cursor.exists() else NO_STEP
        project = os.environ.get("WANDB_PROJECT", "agl-otel")
        try:
            self._run: Any = wandb.init(project=project, id=run_id, name=run_id, dir=str(folder), resume="allow")
        except Exception as error:  # it has a tree of its own, and asks servers
            raise SettingsError(f"Weights & Biases takes no run: {error}. WANDB_MODE=offline keeps it in {folder}") from error
        for step in done:
            self.step(step)

    def step(self, step: TrainingStep) -> None:
        """One row."""
        if step.step > self._sent:
            self._run.log(numbers(step), step=step.step, commit=True)  # else the row waits for the next one, and a killed run loses it
            write_json(self._cursor, sealed({"step": step.step}))
            self._sent = step.step

    def close(self) -> None:
        """Send what waits."""
        self._run.finish()


class Plots:
    """plots.png in the run's folder: reward, refused, tokens by step."""

    def begin(self, run_id: str, folder: Path | None, done: Sequence[TrainingStep]) -> None:
        """Begin with what is done."""
        assert folder is not None
        self._title, self._path = run_id, folder / PICTURE
        self._steps = list(done)

    def step(self, step: TrainingStep) -> None:
        """Draw from time to time."""
        self._steps.append(step)
        if len(self._steps) % DRAWN_EVERY_STEPS == 0:
            self._draw()

    def close(self) -> None:
        """Draw all."""
        if self._steps:
            self._draw()

    def _draw(self) -> None:
        from agl_otel.algorithms.plots import draw

        draw(self._steps, self._path, title=self._title)


@dataclass(frozen=True)
class _Kind:
    make: Callable[[], MetricSink]
    module: str
    extra: str


SINKS: Final[Mapping[str, _Kind]] = {
    "tensorboard": _Kind(TensorBoard, "tensorboardX", "tensorboard"),
    "wandb": _Kind(WandB, "wandb", "wandb"),
    "plots": _Kind(Plots, "matplotlib", "train"),
}
"""By name: what makes one, what it imports, and the extra that has it."""
_UNASKED: Final = ("tensorboard", "plots")


def check_metrics(wanted: Sinks | None) -> None:
    """Raise UsageError for a name that is unknown, SettingsError that says which extra is not installed."""
    for name in wanted or ():
        if not isinstance(name, str):
            continue
        if name not in SINKS:
            raise UsageError(f"metrics has {name!r}: there are {', '.join(SINKS)}")
        if not _installed(name):
            extra = SINKS[name].extra
            raise SettingsError(
                f"metrics = {name!r} needs the [{extra}] extra ({SINKS[name].module} is missing): pip install 'agl-otel[{extra}]'"
            )


def sinks_of(wanted: Sinks | None, *, kept: bool) -> list[MetricSink]:
    """The sinks that are wanted. None: of those that ask nobody, all whose package is installed, where the run is `kept`.

    Raises UsageError for one of ours where it is not.
    """
    if not kept and (ours := [name for name in wanted or () if isinstance(name, str)]):
        raise UsageError(f"metrics has {ours[0]!r}, which is kept in the run's folder: give run_dir")
    names = [name for name in _UNASKED if kept and _installed(name)] if wanted is None else wanted
    return [SINKS[each].make() if isinstance(each, str) else each for each in names]


def numbers(step: TrainingStep) -> dict[str, float]:
    """The numbers among a step's metrics."""
    return {name: value for name, value in step.metrics.items() if isinstance(value, int | float)}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(SINKS[name].module) is not None

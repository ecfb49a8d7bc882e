"""Metric sinks show the figures of a run's steps: TensorBoard, Weights & Biases, a picture.

A sink implements MetricSink; `SINKS` lists the built-in ones by name. Each gets every number of a TrainingStep's metrics. A validation
that is no part of a step (`validation.is_validation`) comes as a TrainingStep of its own, after the one whose weights it is of (0: none).
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

from agl_otel.algorithms.checked_files import read_checked, with_checksum, write_json
from agl_otel.algorithms.validation import is_validation
from agl_otel.errors import SettingsError, UsageError
from agl_otel.types import TrainingStep

TENSORBOARD: Final = "tensorboard"
WANDB: Final = "wandb.json"
PICTURE: Final = "plots.png"
DRAWN_EVERY_STEPS: Final = 25  # drawing takes half a second of CPU; also drawn at the end
NO_ROW: Final = -1
Sinks = Sequence[Any]
"""Names in SINKS, and MetricSink objects."""


class MetricSink(Protocol):
    """Receives the figures of one run, in calls by one thread.

    An exception in `begin` ends the run. After one in `step`, and where `step` or `close` does not return in time
    (`run_log.SINK_SECONDS`), the run continues without the sink.
    """

    def begin(self, run_id: str, folder: Path | None, done: Sequence[TrainingStep]) -> None:
        """Start a run, or resume it after the steps in `done`, discarding later ones. `folder`: of the run; None: in memory."""
        ...

    def step(self, step: TrainingStep) -> None:
        """Show a step that is done, or a validation of it. A prompt search that is resumed sends its steps again."""
        ...

    def close(self) -> None:
        """Finish; called when the run ends, also on errors."""
        ...


class TensorBoard:
    """Writes event files in the run's folder. They are rewritten when a run is resumed, so that no step appears twice.

    Events are written in the calling thread: the thread of tensorboardX's SummaryWriter ends when the disk is full, and calls then wait for
    it forever.
    """

    def begin(self, run_id: str, folder: Path | None, done: Sequence[TrainingStep]) -> None:
        """Replace old event files by one with the steps in `done`."""
        with _without_torch():
            from tensorboardX.event_file_writer import EventsWriter

        assert folder is not None
        place = folder / TENSORBOARD
        place.mkdir(parents=True, exist_ok=True)
        for old in place.glob("events.*"):
            old.unlink()
        self._writer: Any = EventsWriter(str(place / "events"))
        for step in done:
            self._write(step)
        self._writer.flush()

    def step(self, step: TrainingStep) -> None:
        """Write one scalar for each number; dots in names become groups."""
        self._write(step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _write(self, step: TrainingStep) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        from tensorboardX.summary import scalar

        for name, value in numbers(step).items():
            summary = scalar(name.replace(".", "/"), value)
            self._writer.write_event(Event(wall_time=step.end_time, step=step.step, summary=summary))


@contextlib.contextmanager
def _without_torch() -> Generator[None]:
    """Prevent imports of torch by this thread during the block.

    tensorboardX imports it for a type hint, which takes seconds and 400 MB that a prompt search does not need.
    """
    this_thread = threading.get_ident()

    class NoTorch(MetaPathFinder):
        def find_spec(self, fullname: str, path: object, target: object = None) -> None:
            if fullname == "torch" and threading.get_ident() == this_thread:
                raise ModuleNotFoundError("torch is not imported here", name=fullname)

    finder = NoTorch()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class WandB:
    """Logs to a Weights & Biases run with the run's id. Project, mode and key come from W&B's environment variables (WANDB_…).

    Rows are drawn by their `step`. W&B's own count of rows, which must grow with each, is `_row_number`; wandb.json records the last one,
    so that a resumed run sends no row twice.
    """

    def begin(self, run_id: str, folder: Path | None, done: Sequence[TrainingStep]) -> None:
        """Open the W&B run and send the steps in `done` that it lacks. Raises SettingsError where W&B fails."""
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        assert folder is not None
        self._cursor = folder / WANDB
        self._sent: int = read_checked(self._cursor)["row"] if self._cursor.exists() else NO_ROW
        project = os.environ.get("WANDB_PROJECT", "agl-otel")
        try:
            self._run: Any = wandb.init(project=project, id=run_id, name=run_id, dir=str(folder), resume="allow")
        except Exception as error:  # W&B raises many types, network errors among them
            raise SettingsError(f"Weights & Biases cannot open a run: {error}. WANDB_MODE=offline stores it in {folder}") from error
        self._run.define_metric("*", step_metric="step")
        for step in done:
            self.step(step)

    def step(self, step: TrainingStep) -> None:
        """Log one row."""
        row = _row_number(step)
        if row > self._sent:
            self._run.log({**numbers(step), "step": step.step}, step=row, commit=True)  # otherwise it is held back until the next one
            write_json(self._cursor, with_checksum({"row": row}))
            self._sent = row

    def close(self) -> None:
        """Send buffered rows and close the W&B run."""
        self._run.finish()


def _row_number(step: TrainingStep) -> int:
    """Return a number that grows from a step to its validation, and to the next step."""
    return 2 * step.step + is_validation(step.metrics)


class Plots:
    """Draws plots.png in the run's folder: reward, refused samples and tokens by step."""

    def begin(self, run_id: str, folder: Path | None, done: Sequence[TrainingStep]) -> None:
        """Start with the steps in `done`."""
        assert folder is not None
        self._title, self._path = run_id, folder / PICTURE
        self._steps = list(done)

    def step(self, step: TrainingStep) -> None:
        """Draw after every DRAWN_EVERY_STEPS steps."""
        self._steps.append(step)
        if len(self._steps) % DRAWN_EVERY_STEPS == 0:
            self._draw()

    def close(self) -> None:
        """Draw all steps."""
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
"""{name: its class, the package that it imports, and the extra that installs it}."""
_DEFAULT: Final = ("tensorboard", "plots")
"""Sinks that need no account and no network."""


def check_metrics(selected: Sinks | None) -> None:
    """Raise UsageError for an unknown name, and SettingsError, naming the extra, for a package that is not installed."""
    if isinstance(selected, str):
        raise UsageError(f'metrics = "{selected}": it must be a list; write ["{selected}"], or leave it out')
    for name in selected or ():
        if isinstance(name, str) and list(selected or ()).count(name) > 1:
            raise UsageError(f'metrics has "{name}" twice: name each once')
        if not isinstance(name, str):
            if lacking := [method for method in ("begin", "step", "close") if not callable(getattr(name, method, None))]:
                raise UsageError(
                    f"metrics has {name!r}, a {type(name).__name__} without {lacking[0]}(): it must be one of {', '.join(SINKS)}, or a "
                    "MetricSink object; give one of these, or leave it out"
                )
            continue
        if name not in SINKS:
            raise UsageError(f"metrics has {name!r}: it must be one of {', '.join(SINKS)}; give one of these, or leave it out")
        if not _installed(name):
            extra = SINKS[name].extra
            raise SettingsError(
                f"metrics = {name!r} needs the [{extra}] extra ({SINKS[name].module} is missing): pip install 'agl-otel[{extra}]'"
            )


def sinks_of(selected: Sinks | None, *, has_folder: bool) -> list[MetricSink]:
    """Make the selected sinks. None: the default sinks whose package is installed, if the run has a folder.

    Raises UsageError for a built-in sink in a run without a folder.
    """
    if not has_folder and (ours := [name for name in selected or () if isinstance(name, str)]):
        raise UsageError(f"metrics has {ours[0]!r}, which is stored in the run's folder: give run_dir")
    names = [name for name in _DEFAULT if has_folder and _installed(name)] if selected is None else selected
    return [SINKS[each].make() if isinstance(each, str) else each for each in names]


def numbers(step: TrainingStep) -> dict[str, float]:
    """Return the numeric metrics of a step."""
    return {name: value for name, value in step.metrics.items() if isinstance(value, int | float)}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(SINKS[name].module) is not None

"""Metric sinks: their output for a run and for a resumed one, and errors where one is not available."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from agl_otel.algorithms.checked_files import with_checksum, write_json
from agl_otel.algorithms.metric_sinks import PICTURE, Plots, TensorBoard, check_metrics, sinks_of
from agl_otel.algorithms.plots import curves
from agl_otel.algorithms.run_folder import RUN
from agl_otel.algorithms.run_log import RunLog, flat
from agl_otel.algorithms.validation import Validation, note_validation
from agl_otel.errors import SettingsError, UnavailableError, UsageError
from agl_otel.types import TrainingStep

pytestmark = pytest.mark.full

PNG = b"\x89PNG"


def a_step(number: int, **metrics: Any) -> TrainingStep:
    given = {"reward_mean": number / 10, "tokens": 10 * number, "refused.no_reward": number, "digest": "d", **metrics}
    return TrainingStep(run_id="grpo-1", algorithm="grpo", step=number, start_time=1e9, end_time=1e9 + number, metrics=given)


def a_validation(number: int) -> TrainingStep:
    """As a run log sends it to sinks."""
    return a_step(number).model_copy(update={"metrics": {"val_reward": number / 10, "val_rollouts": 4, "val_without_reward": 1}})


def scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yield (tag, step, value) from all event files, whose records are a length, its checksum, a protobuf and its checksum."""
    from tensorboardX.proto import event_pb2

    for path in sorted(folder.glob("events.*")):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event: Any = cast("Any", event_pb2).Event.FromString(content[12 : 12 + size])
            yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)
            content = content[16 + size :]


class FakeStore:
    """A StepStore that records steps, or is unavailable."""

    def __init__(self, *, away: bool = False) -> None:
        self.away = away
        self.steps: list[int] = []

    async def record_figures(self, figures: Mapping[str, float], *, algorithm: str) -> None:
        if self.away:
            raise UnavailableError("the collector is away")

    async def record_steps(self, steps: Sequence[TrainingStep]) -> int:
        if self.away:
            raise UnavailableError("the collector is away")
        self.steps += [step.step for step in steps]
        return len(steps)

    async def record_outcome(self, run_id: str, outcome: str, *, algorithm: str) -> None:
        if self.away:
            raise UnavailableError("the collector is away")


def test_tensorboard_has_each_value_once_after_a_resume(tmp_path: Path) -> None:
    first = TensorBoard()
    first.begin("grpo-1", tmp_path, [])
    for number in (1, 2, 3):
        first.step(a_step(number))
    first.close()
    again = TensorBoard()
    again.begin("grpo-1", tmp_path, [a_step(1), a_step(2)])
    for number in (3, 4):
        again.step(a_step(number, reward_mean=number / 5))
    again.close()
    found = list(scalars(tmp_path / "tensorboard"))
    assert sorted((tag, step) for tag, step, _ in found) == sorted(
        (tag, step) for tag in ("reward_mean", "tokens", "refused/no_reward") for step in (1, 2, 3, 4)
    )
    rewards = {step: value for tag, step, value in found if tag == "reward_mean"}
    assert rewards == pytest.approx({1: 0.1, 2: 0.2, 3: 0.6, 4: 0.8})


def test_tensorboard_has_a_step_in_its_file_when_the_step_returns(tmp_path: Path) -> None:
    sink = TensorBoard()
    sink.begin("grpo-1", tmp_path, [])
    names = {f"figure_{number}" for number in range(100)}
    sink.step(a_step(1, **dict.fromkeys(names, 1.0)))
    assert names <= {tag for tag, _, _ in scalars(tmp_path / "tensorboard")}
    sink.close()


def test_tensorboard_does_not_import_torch_or_block_its_import(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the [train] extra")
    program = f"""
import sys
from pathlib import Path
from agl_otel.algorithms.metric_sinks import TensorBoard
sink = TensorBoard()
sink.begin("apo-1", Path({str(tmp_path)!r}), [])
sink.close()
assert "torch" not in sys.modules
import torch.version
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    assert list((tmp_path / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("metrics", [{}, {"best_score": 1.0, "editor_tokens": 3, "tokens": None}, {"reward_mean": math.nan}])
def test_a_plot_is_written_when_the_run_ends(tmp_path: Path, metrics: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib", reason="needs the [train] extra")
    plots = Plots()
    plots.begin("grpo-1", tmp_path, [a_step(1)])
    plots.step(a_step(2, **metrics))
    assert not (tmp_path / PICTURE).exists()
    plots.close()
    assert (tmp_path / PICTURE).read_bytes()[:4] == PNG
    assert [path.name for path in tmp_path.iterdir()] == [PICTURE]


def test_a_plot_has_the_validations_and_no_gap_where_they_are() -> None:
    rows = [a_validation(0), a_step(1), a_step(2), a_validation(2), a_step(3)]
    assert curves(rows) == {
        "reward": {"reward_mean": {1: 0.1, 2: 0.2, 3: 0.3}, "val_reward": {0: 0.0, 2: 0.2}},
        "refused": {"refused": {1: 0, 2: 0, 3: 0}},
        "tokens": {"tokens": {1: 10, 2: 20, 3: 30}},
    }


def test_a_run_without_steps_writes_no_plot(tmp_path: Path) -> None:
    plots = Plots()
    plots.begin("grpo-1", tmp_path, [])
    plots.close()
    assert not list(tmp_path.iterdir())


def test_unknown_sinks_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="metrics has 'tensorbord': it must be one of tensorboard, wandb, plots"):
        check_metrics(["tensorbord"])
    with pytest.raises(UsageError, match="metrics has 'tensorboard', which is stored in the run's folder: give run_dir"):
        sinks_of(["tensorboard"], has_folder=False)
    own = TensorBoard()
    check_metrics([own])
    assert sinks_of([own], has_folder=False) == [own]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed here")
def test_the_error_for_a_missing_extra_names_it() -> None:
    with pytest.raises(SettingsError, match=r"needs the \[wandb\] extra \(wandb is missing\): pip install 'agl-otel\[wandb\]'"):
        check_metrics(["wandb"])


def test_the_default_sinks_of_a_run_with_a_folder_write_files() -> None:
    assert [type(sink) for sink in sinks_of(None, has_folder=True)][:1] == [TensorBoard]
    assert sinks_of(None, has_folder=False) == sinks_of([], has_folder=True) == []


def test_nested_metrics_are_flattened_to_numbers_and_texts() -> None:
    assert flat({"a": 1, "b": {"c": 2.5, "d": {"e": True}}, "f": [1], "g": None, "h": "x"}) == {"a": 1, "b.c": 2.5, "b.d.e": True, "h": "x"}


async def test_a_run_continues_without_a_failing_sink(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Plots):
        asked = 0

        def step(self, step: TrainingStep) -> None:
            self.asked += 1
            raise OSError("disk full")

    broken, store = Broken(), FakeStore()
    with caplog.at_level(logging.WARNING):
        async with RunLog(store, run_id="grpo-1", algorithm="grpo", folder=tmp_path, sinks=[broken]) as log:
            await log.begin([])
            for number in (1, 2):
                await log.note(a_step(number), {})
    assert (broken.asked, store.steps) == (1, [1, 2])
    assert "run grpo-1 continues without Broken: OSError('disk full')" in caplog.text


class Recorded(Plots):
    """The steps that a sink gets, with the metrics of validations."""

    def begin(self, run_id: str, folder: Path | None, done: Sequence[TrainingStep]) -> None:
        self.got: list[tuple[int, Mapping[str, Any] | None]] = []
        for step in done:
            self.step(step)

    def step(self, step: TrainingStep) -> None:
        self.got.append((step.step, step.metrics if "val_reward" in step.metrics else None))

    def close(self) -> None:
        self.got.append((-1, None))


async def test_sinks_get_each_validation_of_the_run_folder_once_after_its_step(tmp_path: Path) -> None:
    def noted(step: int, score: float) -> Mapping[str, Any]:
        note_validation(tmp_path, Validation(step, f"step-{step}", score, 4, 1, None))
        return {"val_reward": score, "val_rollouts": 4, "val_without_reward": 1}

    before, sink, store = noted(0, 0.25), Recorded(), FakeStore()
    async with RunLog(store, run_id="grpo-1", algorithm="grpo", folder=tmp_path, sinks=[sink]) as log:
        await log.begin([])
        await log.note(a_step(1), {})
        await log.note_validations()
        second = noted(2, 0.5)  # of a killed run, which had gone further than its checkpoint
        await log.note_validations()
        await log.note(a_step(2), {})
        await log.note_validations()
        await log.note_validations()
    assert sink.got == [(0, before), (1, None), (2, None), (2, second), (-1, None)]
    assert store.steps == [1, 2], "the store has the rollouts of a validation"
    async with RunLog(store, run_id="grpo-1", algorithm="grpo", folder=tmp_path, sinks=[again := Recorded()]) as log:
        await log.begin([a_step(1), a_step(2)])
    assert again.got == sink.got


async def test_steps_with_other_code_than_the_run_was_begun_with_name_it(tmp_path: Path) -> None:
    class Store(FakeStore):
        async def record_steps(self, steps: Sequence[TrainingStep]) -> int:
            self.steps += [(step.step, step.metrics.get("other_code")) for step in steps]  # pyright: ignore[reportAttributeAccessIssue]
            return len(steps)

    fields = {"run_id": "grpo-1", "algorithm": "grpo", "seed": 1, "options": {}, "sources": {"grader": "a.py:g"}}
    forced = [{"step": 2, "changed": {"grader": ["a.py:f", "a.py:g"]}}]
    write_json(tmp_path / RUN, with_checksum({**fields, "forced": forced}))
    async with RunLog(store := Store(), run_id="grpo-1", algorithm="grpo", folder=tmp_path) as log:
        await log.begin([a_step(1), a_step(2)])
        await log.note(a_step(3), {})
    assert store.steps == [(1, None), (2, None), (3, "grader")]


async def test_a_cancelled_run_closes_a_sink_after_the_step_under_way(tmp_path: Path) -> None:
    calls: list[str] = []
    began, end = threading.Event(), threading.Event()

    class Slow(Plots):
        def step(self, step: TrainingStep) -> None:
            began.set()
            end.wait()
            calls.append("step")

        def close(self) -> None:
            calls.append("close")

    async def run() -> None:
        async with RunLog(FakeStore(), run_id="grpo-1", algorithm="grpo", folder=tmp_path, sinks=[Slow()]) as log:
            await log.begin([])
            await log.note(a_step(1), {})

    task = asyncio.create_task(run())
    await asyncio.to_thread(began.wait)
    task.cancel()
    for _ in range(1000):  # a call of `close` would be made now
        await asyncio.sleep(0)
    end.set()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert calls == ["step", "close"]


HEAD = """
import asyncio, logging, resource, sys, threading
from pathlib import Path
from agl_otel.algorithms.metric_sinks import Plots, TensorBoard
from agl_otel.algorithms.run_log import RunLog
from tests.unit.algorithms.test_metrics import FakeStore, a_step
logging.basicConfig(format="%(message)s", stream=sys.stdout)
async def run(sink, **options):
    store = FakeStore()
    async with RunLog(store, run_id="grpo-1", algorithm="grpo", folder=Path(sys.argv[1]), sinks=[sink], **options) as log:
        await log.begin([])
        for number in (1, 2):
            await log.note(a_step(number, **dict.fromkeys(map(str, range(1000)), 1.0)), {})
    print("stored", store.steps)
"""


def printed(program: str, folder: Path) -> list[str]:
    """Run a program to its exit; return the lines that it printed."""
    command = [sys.executable, "-c", HEAD + textwrap.dedent(program), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("stuck", ["step", "close"])
def test_a_sink_that_does_not_return_delays_neither_the_run_nor_its_exit(tmp_path: Path, stuck: str) -> None:
    lines = printed(
        f"""
        class Stuck(Plots):
            def {stuck}(self, *ignored):
                print("asked")
                threading.Event().wait()
        asyncio.run(run(Stuck(), sink_seconds=0.5))
        """,
        tmp_path,
    )
    assert lines == ["asked", "run grpo-1 continues without Stuck: it has not returned for 0.5 s", "stored [1, 2]"]


def test_tensorboard_on_a_full_disk_is_left_out_with_the_error(tmp_path: Path) -> None:
    lines = printed(
        """
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        asyncio.run(run(TensorBoard()))
        """,
        tmp_path,
    )
    assert lines == ["run grpo-1 continues without TensorBoard: OSError(27, 'File too large')", "stored [1, 2]"]


async def test_steps_refused_by_the_store_are_sent_with_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore(away=True)
    async with RunLog(store, run_id="grpo-1", algorithm="grpo") as log:
        await log.begin([a_step(1)])
        await log.note(a_step(2), {})
        store.away = False
        await log.note(a_step(3), {})
    assert store.steps == [1, 2, 3]
    lost = FakeStore(away=True)
    with caplog.at_level(logging.WARNING):
        async with RunLog(lost, run_id="grpo-1", algorithm="grpo") as log:
            await log.begin([])
            await log.note(a_step(1), {})
    assert "1 steps of run grpo-1, from step 1 on, are not stored as spans" in caplog.text

"""The real wandb package, offline, in a separate environment: a continued run sends no step twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments import AbsentError, installed

pytestmark = pytest.mark.full
WANDB = ("wandb==0.31.0",)
SHOW = '''
import glob, json, sys, time
sys.path.append(sys.argv[1])  # ours first: wandb brings other versions of what we use
from pathlib import Path
from agl_otel.algorithms.metric_sinks import SINKS, check_metrics
from agl_otel.types import TrainingStep
from wandb.proto.wandb_internal_pb2 import Record

folder = Path(sys.argv[2])
def step(number):
    """With a half, the validation after a step."""
    metrics = {"reward_mean": number / 10} if number == int(number) else {"val_reward": number / 10}
    return TrainingStep(run_id="grpo-1", algorithm="grpo", step=int(number), start_time=1e9, end_time=1e9, metrics=metrics)

check_metrics(["wandb"])
started = 0
for done, new in (((0.5,), (1, 2, 2.5, 3)), ((0.5, 1, 2, 2.5), (3, 4, 4.5))):
    while int(time.time()) <= started:  # W&B names a run's folder by the second of its start
        time.sleep(0.05)
    sink = SINKS["wandb"].make()
    sink.begin("grpo-1", folder, [step(number) for number in done])
    for number in new:
        sink.step(step(number))
    sink.close()
    started = int(time.time())
import wandb
wandb.teardown()  # its own process writes the last rows, and this waits for its end
def records(content):
    """Of LevelDB's log format: blocks of 32 KiB; checksum, length, kind (whole, first, middle, last), data."""
    place, data = 7, b""
    while place < len(content):
        if len(content) - place < 7 or 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        data += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield Record.FromString(data)
            data = b""
rows, own, axes = [], [], set()
for path in sorted(glob.glob(f"{folder}/wandb/offline-run-*/*.wandb")):
    for record in records(Path(path).read_bytes()):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append([items["step"], items.get("reward_mean"), items.get("val_reward")])
            own.append(items["_step"])
        elif record.WhichOneof("record_type") == "metric":
            axes.add((record.metric.glob_name, record.metric.step_metric))
assert own == sorted(set(own)), own
assert axes == {("*", "step")}, axes
print("ROWS", json.dumps(rows))
'''


def test_offline_every_step_and_validation_is_sent_once_even_after_a_stop(tmp_path: Path) -> None:
    try:
        place = installed("wandb", WANDB)
    except AbsentError as absent:
        pytest.skip(str(absent))
    packages = place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", SHOW, str(packages), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.partition("ROWS ")[2])
    assert rows == [[0, None, 0.05], [1, 0.1, None], [2, 0.2, None], [2, None, 0.25], [3, 0.3, None], [4, 0.4, None], [4, None, 0.45]]

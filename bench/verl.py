"""verl end to end on the CPU: does an outside agent of two calls learn, over a kill on the way? `python -m bench.verl`, several minutes.

Runs examples/verl/job.toml in the environment of tests/verl.txt, kills it once with kill -9 at the step that `--kill-at` says (0: not at
all), starts it again, and prints the scores before and after, and what a step takes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.environments import over_ours

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Print the figures; 1 where it did not learn."""
    parser = argparse.ArgumentParser(prog="python -m bench.verl")
    parser.add_argument("--kill-at", type=int, default=12)
    parser.add_argument("--job", type=Path, default=ROOT / "examples" / "verl" / "job.toml")
    options = parser.parse_args()
    python = over_ours("verl", ROOT / "tests" / "verl.txt")
    with tempfile.TemporaryDirectory(prefix="bench-verl-") as place:
        began = time.monotonic()
        told = train(python, Path(place), options.job, options.kill_at)
        lines = [json.loads(line) for line in (Path(place) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "agl/rollouts" in line]
    figures = {
        "score_before": told["score_before"],
        "score_after": told["score_after"],
        "steps": told["steps"],
        "seconds": time.monotonic() - began,
        "reward_first_5": mean(line["agl/reward_mean"] for line in steps[:5]),
        "reward_last_5": mean(line["agl/reward_mean"] for line in steps[-5:]),
        "step_seconds": mean(line["timing_s/step"] for line in steps),
        "adapter_cpu_ms_a_rollout": 1e3 * mean(line["agl/adapter_cpu_seconds"] / line["agl/rollouts"] for line in steps),
        "rollouts_without_sample": sum(line["agl/rollouts_without_sample"] for line in steps),
    }
    for metric, value in figures.items():
        print(json.dumps({"bench": "verl", "metric": metric, "value": value, "unit": "", "baseline": None, "ratio": None}))
    return 0 if told["score_before"] <= 0.3 and told["score_after"] >= 0.75 else 1


def train(python: Path, place: Path, job: Path, kill_at: int) -> Any:
    """Run the job to its end, killed once on the way; what it says."""
    command = [python, "-m", "agl_otel", "train", job.absolute(), "--data-dir", "data", "--run-dir", "run", "--json"]
    environment = {**os.environ, "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]])}
    if kill_at:
        first = subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        while first.poll() is None and steps_done(place) < kill_at:
            time.sleep(0.5)
        first.send_signal(signal.SIGKILL)
        first.wait()
        while running(place / "data" / "stack.json"):  # what it started ends by itself
            time.sleep(0.5)
    return json.loads(subprocess.run(command, cwd=place, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def running(stack: Path) -> bool:
    """Whether a service of the stack that was killed still runs."""
    told = json.loads(stack.read_text()) if stack.exists() else {}
    return any(Path(f"/proc/{service['pid']}").exists() for service in told.values() if isinstance(service, dict) and "pid" in service)


def steps_done(place: Path) -> int:
    """The last step of metrics.jsonl."""
    path = place / "run" / "metrics.jsonl"
    return max((json.loads(line)["step"] for line in path.read_text().splitlines()), default=0) if path.exists() else 0


def mean(values: Any) -> float:
    """Of the values."""
    listed = list(values)
    return sum(listed) / len(listed)


if __name__ == "__main__":
    sys.exit(main())

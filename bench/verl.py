"""verl end to end on the CPU: train an external agent of two calls, over a kill -9. `python -m bench.verl`, several minutes.

Runs examples/verl/job.toml in the environment of tests/verl.txt, kills it with kill -9 at step `--kill-at` (0: never), resumes it, and
prints the scores before and after, the time of a step, and the CPU time by process. `--control` trains on random rewards, from which
nothing can be learned; `--steps` sets the number of steps. `--repeat` runs it twice with one seed, the first time without a kill, and
compares the metrics of the two runs.

Our share is the CPU time of queue, proxy, collector and verl's agent loop workers, relative to that of all processes (including agents and
model server), from the end of the second step to the end of the last. The workers enqueue, read traces and make samples; verl's own work
in them counts as ours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from bench.harness import below, cpu_seconds
from tests.environments import over_ours

ROOT = Path(__file__).parents[1]
SERVICES: Final = ("queue", "proxy", "collector")
"""Parts that stack.json names with their pids: as forks of one process, all services of a stack have its command line."""
PARTS: Final = {"services": "agl_otel.service.forkserver", "loop": "ray::AgentLoopWorker", "runners": "agl_otel.runner"}
"""{part: text in its command line}; "services" are the others of a stack; all other processes are verl's, Ray's and the model server's."""
OWN: Final = ("queue", "proxy", "collector", "loop")
BAR: Final = 0.05
CONTROL_RISE: Final = 0.15  # largest random rise of a mean over 64 tasks
CHANCE = """
import random
from grade import grade as right
def grade(task, answers):
    return right(task, answers) if "held_out" in task else float(random.random() < 0.3)
"""
TASKS = """
from tasks import train, val as held_out
def val(): return [{**task, "held_out": True} for task in held_out()]
"""
UNLIKE: Final = ("timing", "perf/", "_seconds", "checksum")
"""Parts of the names of metrics of time and memory, which differ between equal runs."""
Cpu = dict[str, float]


def main() -> int:
    """Print the figures; return 1 if the agent did not learn (with `--control`: if it did), or our share exceeds the bar."""
    parser = argparse.ArgumentParser(prog="python -m bench.verl")
    parser.add_argument("--kill-at", type=int, default=12)
    parser.add_argument("--job", type=Path, default=ROOT / "examples" / "verl" / "job.toml")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--repeat", action="store_true")
    options = parser.parse_args()
    python = over_ours("verl", ROOT / "tests" / "verl.txt")
    if options.repeat:
        return repeated(python, options)
    with tempfile.TemporaryDirectory(prefix="bench-verl-") as name:
        place = Path(name)
        began = time.monotonic()
        told, spent = train(python, place, written(place, options), options.kill_at)
        lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "rollouts" in line]
    share = sum(spent[part] for part in OWN) / sum(spent.values()) if spent else None
    figures = {
        "score_before": told["score_before"],
        "score_after": told["score_after"],
        "steps": told["steps"],
        "seconds": time.monotonic() - began,
        "reward_first_5": mean(line["reward_mean"] for line in steps[:5]),
        "reward_last_5": mean(line["reward_mean"] for line in steps[-5:]),
        "step_seconds": mean(line["timing_s/step"] for line in steps),
        "adapter_cpu_ms_a_rollout": 1e3 * mean(line["adapter_cpu_seconds"] / line["rollouts"] for line in steps),
        "rollouts_without_sample": sum(line["rollouts_without_sample"] for line in steps),
        **{f"cpu_seconds_a_step_{part}": value for part, value in sorted(spent.items())},
        "own_share_of_cpu": share,
    }
    for metric, value in figures.items():
        bar = BAR if metric == "own_share_of_cpu" else None
        line = {
            "bench": "verl",
            "metric": metric,
            "value": value,
            "unit": "",
            "baseline": bar,
            "ratio": value / bar if bar and value else None,
        }
        print(json.dumps(line))
    if options.control:
        return 0 if told["score_after"] <= told["score_before"] + CONTROL_RISE else 1
    return 0 if told["score_before"] <= 0.3 and told["score_after"] >= 0.75 and share is not None and share <= BAR else 1


def repeated(python: Path, options: argparse.Namespace) -> int:
    """Print the differences between an uninterrupted run and a killed one; return 1 if there are any."""
    runs: list[dict[tuple[int, str], Any]] = []
    for kill_at in (0, options.kill_at):
        with tempfile.TemporaryDirectory(prefix="bench-verl-") as name:
            train(python, Path(name), written(Path(name), options), kill_at)
            lines = [json.loads(line) for line in (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()]
            runs.append(
                {(line["step"], key): value for line in lines for key, value in line.items() if not any(part in key for part in UNLIKE)}
            )
    alone, killed = runs  # the second has more: verl validates again when it resumes
    different = [
        f"step {step}: {key} {value} {killed.get((step, key))}" for (step, key), value in alone.items() if killed.get((step, key)) != value
    ]
    line = {"bench": "verl", "metric": "values_that_differ", "value": len(different), "unit": "", "baseline": len(alone)}
    print(json.dumps({**line, "ratio": None, "against": "values of the uninterrupted run", "first": different[:10]}))
    return 1 if different else 0


def written(place: Path, options: argparse.Namespace) -> Path:
    """Write the job with the options' changes into the folder of the run."""
    text = re.sub(r'"(\w+\.py:)', rf'"{options.job.parent.absolute()}/\1', options.job.read_text())
    if options.steps:
        text = re.sub(r"total_training_steps = \d+", f"total_training_steps = {options.steps}", text)
    if options.repeat:
        text = text.replace('name = "verl"', 'name = "verl"\nseed = 5').replace("save_freq = 10", "save_freq = 1")
    if options.control:
        for name, source in (("chance.py", CHANCE), ("held_out.py", TASKS)):
            (place / name).write_text(f"import sys; sys.path.append({str(options.job.parent.absolute())!r})\n{source}")
        text = re.sub(r'grader = ".*"', 'grader = "chance.py:grade"', text)
        text = re.sub(r'\nval = ".*"', '\nval = "held_out.py:val"', text)
    path = place / "job.toml"
    path.write_text(text)
    return path


def train(python: Path, place: Path, job: Path, kill_at: int) -> tuple[Any, Cpu]:
    """Run the job to its end, with one kill; return its result and the CPU seconds per step by part."""
    command = [python, "-m", "agl_otel", "train", job, "--data-dir", "data", "--run-dir", "run", "--json"]
    environment = {**os.environ, "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]])}
    if kill_at:
        first = subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        while first.poll() is None and steps_done(place) < kill_at:
            time.sleep(0.5)
        first.send_signal(signal.SIGKILL)
        first.wait()
        while running(place / "data" / "stack.json"):  # its services end by themselves
            time.sleep(0.5)
    before = steps_done(place)
    known: dict[int, Cpu] = {}
    with subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            if (done := steps_done(place)) > before:
                known.setdefault(done, spent_below(process.pid, place / "data" / "stack.json"))
            time.sleep(0.2)
        told = process.stdout.read() if process.stdout is not None else b""
    if process.returncode:
        raise RuntimeError(f"the job ended with exit code {process.returncode}")
    if len(known) < 3:  # the first step includes the start, so there is nothing to measure
        return json.loads(told), {}
    _, start, *_, end = sorted(known)
    return json.loads(told), {part: (known[end][part] - known[start][part]) / (end - start) for part in known[end]}


def spent_below(pid: int, stack: Path) -> Cpu:
    """Return the CPU seconds of a process and its descendants by part; `stack`: the stack.json of the services among them."""
    services = {service["pid"]: name for name, service in stack_of(stack).items() if name in SERVICES}
    spent: Cpu = defaultdict(float, dict.fromkeys((*SERVICES, *PARTS, "rest"), 0.0))
    for each in (pid, *below(pid)):
        try:
            command = Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            part = services.get(each) or next((part for part, name in PARTS.items() if name in command), "rest")
            spent[part] += cpu_seconds(each)
        except OSError:  # the process has ended
            continue
    return dict(spent)


def running(stack: Path) -> bool:
    """Return whether a service of the killed stack is still running."""
    return any(Path(f"/proc/{service['pid']}").exists() for service in stack_of(stack).values())


def stack_of(stack: Path) -> dict[str, dict[str, Any]]:
    """Return {service: {pid, address}} of a stack.json; empty where there is none."""
    services = json.loads(stack.read_text()) if stack.exists() else {}
    return {name: service for name, service in services.items() if isinstance(service, dict) and "pid" in service}


def steps_done(place: Path) -> int:
    """Return the last step in metrics.jsonl."""
    path = place / "run" / "metrics.jsonl"
    return max((json.loads(line)["step"] for line in path.read_text().splitlines()), default=0) if path.exists() else 0


def mean(values: Any) -> float:
    """Return the mean of the values."""
    listed = list(values)
    return sum(listed) / len(listed)


if __name__ == "__main__":
    sys.exit(main())

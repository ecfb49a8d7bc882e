"""examples/calculator on a CPU: its agent, tasks, grader and job with a twin of its model, which has two layers and random weights.

The twin has the real vocabulary and a tied head. It was taught to call the calculator and to give the answer of either of two tasks.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

from agl_otel.cli import main
from tests.qwen_twin import make_caller
from tests.system.stack_process import Command, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"
WIDTHS = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES = {"count": 2, "largest": 3, "scored": 2}
DATA = "options = { count = 2, largest = 3, scored = 2 }"
ALGORITHM = """
[algorithm]
name = "grpo"
prompts_per_step = 2
group_size = 4
max_tokens = 48
learning_rate = 1e-4
warmup_steps = 1
minibatches = 2
updates_per_step = 1
micro_batch_tokens = 2048
gradient_checkpointing = true
threads = 2
"""


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"calculator_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def conversations(agent: Any, tasks: list[dict[str, str]]) -> Iterator[list[dict[str, Any]]]:
    """Yield what the twin learns: one call of the calculator, whatever is asked, and then the answer of one of the tasks."""
    source, arguments = random.Random(0), {"expression": "2 * 3"}
    answers = [task["expected"] for task in tasks]
    for place in range(64):
        task = tasks[place % len(tasks)]
        call = {"id": "a", "type": "function", "function": {"name": "calculate", "arguments": arguments}}
        yield [
            {"role": "system", "content": agent.INSTRUCTIONS},
            {"role": "user", "content": task["question"]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": agent.calculate(json.dumps(arguments))},
            {"role": "assistant", "content": f"Answer: {source.choice(answers)}"},
        ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The example with its twin, and the address of a stack."""
    folder = tmp_path_factory.mktemp("calculator")
    shutil.copytree(EXAMPLE, folder / "calculator", ignore=shutil.ignore_patterns("__pycache__"))
    agent, tasks = loaded("agent"), loaded("tasks")
    wanted = [*conversations(agent, tasks.train(**SIZES))]
    make_caller(folder / "calculator/Qwen/Qwen2.5-0.5B-Instruct", wanted, agent.TOOLS, steps=150, **WIDTHS)
    ports = {f"AGL_{name}_PORT": "0" for name in ("QUEUE", "OTLP_GRPC", "OTLP_HTTP", "CLICKHOUSE", "PROXY", "WEB")}
    with Command("up", "--data-dir", str(folder / "data"), log=folder / "up.log", cwd=folder, env=ports):
        until((folder / "data" / "stack.json").exists, "the stack is up")
        yield folder / "calculator", json.loads((folder / "data" / "stack.json").read_text())["queue"]["address"]


def job(folder: Path, options: str) -> Path:
    """Write the example's job for the CPU: its own agent, data and model, with another server and smaller sizes."""
    text = (EXAMPLE / "job.toml").read_text()
    before = text[: text.index("[algorithm]")].replace("options = { seed = 0 }", DATA).replace('server = "vllm"', 'server = "ours"')
    lines = [line for line in before.splitlines() if not line.startswith(("vllm_options", "gpu_memory"))]
    (folder / "cpu.toml").write_text("\n".join(lines) + ALGORITHM + options)
    return folder / "cpu.toml"


def train(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments, "--json"])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured
    return json.loads(captured.out), captured.err


@pytest.mark.parametrize(
    ("options", "worst", "stops"),
    [
        ('dtype = "float32"\nval_every = 1', 1e-2, (1, 2)),
        ('dtype = "bfloat16"\nlora_rank = 4\nlearning_rate_schedule = "linear"', 0.1, (2,)),
    ],
)
def test_the_job_trains_its_twin_on_a_cpu_and_is_resumed(
    options: str, worst: float, stops: tuple[int, ...], place: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = place
    run_dir = folder / f"run-{len(options)}"
    on = ["--store", store]
    checked, said = train(capsys, str(job(folder, f"{options}\nmax_steps = 2")), "--check", *on)
    assert (checked["ok"], checked["train"], checked["val"], checked["warnings"]) == (True, 2, 2, []), checked
    assert checked["memory"]["peak_bytes"] > 0 and "memory on cpu, estimated" in said
    steps: list[dict[str, Any]] = []
    for stop in stops:
        result, _ = train(capsys, str(job(folder, f"{options}\nmax_steps = {stop}")), "--run-dir", str(run_dir), *on)
        before, steps = steps, [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert (result["steps"], len(steps), steps[: len(before)]) == (stop, stop, before)
    for step in steps:
        assert step["rollouts"] == step["trajectories"] == 8 and not step["refused"], step
        assert 0 < step["reward_mean"] < 1 and step["zero_variance_groups"] < 2 and step["max_ratio_error"] < worst, step
        assert step["gradient_norm"] > 0 and step["next_version"] != step["weights_version"], step
    validated = [each["step"] for each in json.loads((run_dir / "validation.json").read_text())["validations"]]
    assert validated == ([0, 1, 2] if "val_every" in options else [0, 2])

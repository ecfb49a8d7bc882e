from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

from agl_otel.compat.execution import ClientServerExecutionStrategy, SharedMemoryExecutionStrategy
from agl_otel.compat.trainer import Trainer
from agl_otel.errors import SettingsError
from agl_otel.jobs.custom import CustomRun
from agl_otel.jobs.job import Job
from agl_otel.types import PromptTemplate

EXAMPLE = Path(__file__).parents[3] / "examples" / "first_light" / "job.toml"


def test_the_example_job_loads_and_has_tasks_of_both_kinds() -> None:
    job = Job.load(EXAMPLE, overrides={"data": {"options": {"target": 3}}, "policy": {"seed": 7}})
    train, val = job.tasks("train"), job.tasks("val")
    assert len(val) >= 64 and job.policy.seed == 7
    assert not {task["question"] for task in train} & {task["question"] for task in val}, "held out means held out"
    assert all(int(task["expected"]) == 9 - int(task["question"][-1]) for task in val)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("learning_rate", "learing_rate", ["[algorithm] unknown key learing_rate: did you mean learning_rate?"]),
        ("max_steps = 200", "max_steps = 'many'", ["[algorithm] max_steps", "integer"]),
        ("[policy]", "[polcy]", ["unknown table [polcy]: did you mean policy?"]),
        ("grader =", "grader", ["not TOML"]),
        ('name = "grpo"', 'name = "ppo"', ["[algorithm] name", "grpo"]),
        ("concurrency = 32", "concurrency = 0", ["[agent] concurrency = 0", "at least 1"]),
    ],
)
def test_a_wrong_job_file_is_refused_by_name(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(EXAMPLE.read_text().replace(old, new))
    with pytest.raises(SettingsError) as caught:
        Job.load(path)
    for word in ["job.toml", *words]:
        assert word in str(caught.value)


def test_a_job_file_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match=r"none\.toml cannot be read"):
        Job.load(Path("none.toml"))


def test_an_agent_must_have_a_function_or_command(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[agent]\n[data]\ntrain = 'a.jsonl'\nval = 'b.jsonl'\n")
    with pytest.raises(SettingsError, match="give `function` or `command`"):
        Job.load(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("1\n\n{", "cannot be read: line 3 is not JSON"),
        ('1\n{"q": NaN}', "cannot be read: line 2 is not JSON .NaN is no JSON"),
        ("1e999", "cannot be read: line 1 is not JSON .the number 1e999"),
        ("\n", "holds no task"),
    ],
)
def test_data_that_is_missing_broken_or_empty_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[agent]\nfunction = 'a.py:f'\n[data]\ntrain = 'tasks.jsonl'\nval = 'tasks.jsonl'\n")
    if content is not None:
        (tmp_path / "tasks.jsonl").write_text(content)
    with pytest.raises(SettingsError, match=rf"tasks\.jsonl.*{words}"):
        Job.load(path).tasks("train")


SEARCH = Path(__file__).parents[3] / "examples" / "apo" / "job.toml"


def test_a_job_may_search_for_prompts_and_then_needs_no_torch() -> None:
    job = Job.load(SEARCH, overrides={"data": {"options": {"target": "flip"}}})
    assert job.run_by == "agl_otel.jobs.prompts" and job.options["beam_width"] == 2 and "name" not in job.options
    assert job.resources["prompt_template"] == PromptTemplate(template="answer", engine="f-string")
    assert Job.load(EXAMPLE).run_by == "agl_otel.jobs.grpo"
    imports = "import sys; from pathlib import Path; from agl_otel.jobs.job import Job; from agl_otel.jobs.prompts import PromptSearchRun"
    program = f"{imports}; Job.load(Path(sys.argv[1]));"
    subprocess.run([sys.executable, "-c", f"{program} assert 'torch' not in sys.modules", str(SEARCH)], check=True)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "apo"', 'name = "gepa"', ["[algorithm] unknown key gradient_model"]),
        ("beam_width = 2", "beam_width = 'wide'", ["[algorithm] beam_width", "integer"]),
        ("beam_width = 2", "run_dir = 'here'", ["[algorithm] unknown key run_dir"]),
        ('model = "words" }', "modell = 1 }", ["[resources] main_llm"]),
        ("base_url", "base", ["[editor] unknown key base: did you mean base_url?"]),
    ],
)
def test_a_wrong_search_is_refused_by_name(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(SEARCH.read_text().replace(old, new))
    with pytest.raises(SettingsError) as caught:
        Job.load(path)
    for word in ["job.toml", *words]:
        assert word in str(caught.value)


OWN = """
import agl_otel as agl

class Mine(agl.Algorithm):
    def __init__(self, *, rounds: int, run_dir=None, rollout_config=None):
        super().__init__()
        self.given = rounds, run_dir, rollout_config

@agl.algo
def made(train_dataset):
    pass

def none(rounds: int = 1):
    return "no algorithm"
"""


def custom_run(tmp_path: Path, algorithm: str, data: str = "train = 'tasks.jsonl'") -> CustomRun:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "tasks.jsonl").write_text("1\n")
    path = tmp_path / "job.toml"
    path.write_text(f"[agent]\nfunction = 'a.py:f'\ntimeout_seconds = 7.0\n[data]\n{data}\n[algorithm]\n{algorithm}\n")
    return CustomRun(Job.load(path), cast("Any", None), tmp_path / "run")


async def test_a_custom_algorithm_gets_its_options_and_the_jobs_arguments(tmp_path: Path) -> None:
    run = custom_run(tmp_path, "name = 'mine.py:Mine'\nrounds = 3")
    algorithm: Any = run.algorithm()
    rounds, folder, config = algorithm.given
    assert (rounds, folder, config.timeout_seconds) == (3, tmp_path / "run", 7.0) and run.job.run_by == "agl_otel.jobs.custom"


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("name = 'mine.py:Mine'", ["mine.py:Mine", "rounds"]),
        ("name = 'mine.py:Mine'\nrounds = 1\nturns = 2", ["turns", "it takes rounds, run_dir, rollout_config"]),
        ("name = 'mine.py:made'\nrounds = 1", ["rounds", "mine.py:made", "takes no options"]),
        ("name = 'mine.py:none'", ["mine.py:none", "gives a str"]),
    ],
)
async def test_an_algorithm_that_does_not_fit_is_refused_by_name(tmp_path: Path, algorithm: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        custom_run(tmp_path, algorithm).algorithm()
    for word in words:
        assert word in str(caught.value)


async def test_tasks_that_an_algorithm_cannot_take_or_lacks_are_named(tmp_path: Path) -> None:
    run = custom_run(tmp_path, "name = 'mine.py:made'", "train = 'tasks.jsonl'\nval = 'tasks.jsonl'")
    with pytest.raises(SettingsError, match=r"val: algorithm mine\.py:made takes no val_dataset"):
        await run.fit([1], [1])
    with pytest.raises(SettingsError, match=r"\[data\] val is missing: grpo scores"):
        custom_run(tmp_path, "name = 'grpo'").job.tasks("val")
    with pytest.raises(SettingsError, match=r"\[algorithm\] polling_interval.*number"):
        custom_run(tmp_path, "name = 'baseline'\npolling_interval = 'often'")


@pytest.mark.parametrize("example", sorted(path.parent.name for path in EXAMPLE.parents[1].glob("*/job.toml")))
def test_job_files_of_the_examples_are_read(example: str) -> None:
    job, wrong = Job.read(EXAMPLE.parents[1] / example / "job.toml")
    assert job is not None and all("this machine has no device of type cuda" in each for each in wrong), wrong
    assert job.agent.function or job.agent.command


@pytest.mark.parametrize("strategy", [None, "cs", {"type": "cs", "server_port": 1}, ClientServerExecutionStrategy(server_port=1)])
def test_the_trainers_port_overrides_its_strategys(strategy: Any) -> None:
    made = Trainer(strategy=strategy, port=2).strategy
    assert isinstance(made, ClientServerExecutionStrategy) and made.server_port == 2
    assert isinstance(Trainer(strategy="shm", port=2).strategy, SharedMemoryExecutionStrategy)

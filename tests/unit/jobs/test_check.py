"""`agl-otel train JOB.toml --check` reports all problems of a job at once, and starts nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

from agl_otel.algorithms.grpo.tiny import make_policy
from agl_otel.algorithms.run_folder import RUN, SOURCES, RunFolder, Sources
from agl_otel.cli import main
from agl_otel.jobs import grpo
from agl_otel.jobs.check import CheckReport, check_job
from agl_otel.jobs.improve_options import NO_IMPROVE
from agl_otel.jobs.job import Job
from agl_otel.jobs.sources import sources_of

EXAMPLES = Path(__file__).parents[3] / "examples"
AGENT = '[agent]\nfunction = "mine.py:agent"\n[data]\ntrain = "mine.py:tasks"\nval = "mine.py:tasks"\n'
MINE = """
import agl_otel as agl
def agent(task): return 1.0
def score(task, answer): return 1.0
def tasks(wrong=False): return [{"question": "?"}] if not wrong else nobody
@agl.algo
def own(train_dataset): pass
"""


async def checked(folder: Path, job: str, store: str = "") -> CheckReport:
    (folder / "mine.py").write_text(MINE)
    (folder / "job.toml").write_text(job)
    return await check_job(folder / "job.toml", store=store)


async def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    job = """
[agent]
function = "gone.py:agent"
grader = "mine.py:grade"
command = ["python", "away.py", "{answer}"]
runers = 2
[data]
train = "tasks.jsonl"
val = "mine.py:tasks"
options = { wrong = true }
[policy]
model = "nowhere"
server = "vllm"
vllm = "/no/such/vllm"
[algorithm]
name = "grpo"
group_size = 1
learing_rate = 1.0
max_steps = "many"
agent_match = "("
metrics = ["paper"]
"""
    found = await checked(tmp_path, job, store="127.0.0.1:1")
    wanted = [
        r"\[agent\] unknown key runers: did you mean runners\?",
        r"\[algorithm\] unknown key learing_rate: did you mean learning_rate\?",
        r"\[algorithm\] max_steps = \"many\": it must be an integer, at least 1",
        r"metrics has 'paper'",
        r"\[algorithm\] group_size = 1: it must be at least 2",
        r"\[policy\] model = 'nowhere': .*config\.json",
        r"there is no program '/no/such/vllm'",
        r"\[data\] train = 'tasks\.jsonl' cannot be read",
        r"\[data\] val = 'mine\.py:tasks' gives no tasks: NameError: name 'nobody'",
        r"\[agent\] function: there is no file .*gone\.py",
        r"\[agent\] grader: mine\.py has no 'grade'; its functions are: agent",
        r"\[agent\] command: there is no file .*away\.py",
        r"\[algorithm\] agent_match = \"\(\": it is no regular expression",
        r"the store 127\.0\.0\.1:1: ",
    ]
    for words in wanted:
        assert any(re.search(words, problem) for problem in found.problems), (words, found.problems)
    assert len(found.problems) == len(wanted), found.problems


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ('name = "apo"', [r"\[resources\] has no prompt for apo", "OPENAI_API_KEY is not set"]),
        (
            'name = "gepa"\nreflect_prompt = "r.poml"',
            [r"has no prompt for gepa", r"reflect_prompt: there is no file .*r\.poml", "OPENAI_API"],
        ),
        ('name = "sft"\ntop_fraction = 2.0', [r"top_fraction = 2\.0: it must be at least 0\.0001 and at most 1"]),
        ('name = "verl"\nconfig = { "data.train_files" = "x" }', ["data.train_files has no place here"]),
        ('name = "verl"\nconfig = {}', [r"rollout\.n is 1"]),
        ('name = "mine.py:own"\nsteps = 3', ["steps: mine.py:own is made already and takes no options"]),
        ('name = "mine.py:own"', [r"\[data\] val: algorithm mine\.py:own takes no val_dataset"]),
        ('name = "mine.py:nothing"', ["has no 'nothing'"]),
        ('name = "ppo"', [r"\[algorithm\] name = \"ppo\": it must be 'grpo', "]),
    ],
)
async def test_each_algorithm_checks_its_needs(tmp_path: Path, algorithm: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = await checked(tmp_path, f"{AGENT}[algorithm]\n{algorithm}\n")
    rest = [problem for problem in found.problems if "[verl] extra" not in problem]
    assert len(rest) == len(words) and all(re.search(word, problem) for word, problem in zip(words, rest, strict=True)), rest


async def test_a_missing_extra_is_one_of_the_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    found = await checked(tmp_path, AGENT + '[algorithm]\nlora_rank = 4\nmetrics = ["wandb"]\n')
    assert [re.findall(r"\[\w+\] extra", problem) for problem in found.problems] == [["[wandb] extra"], ["[lora] extra"]]


async def test_a_command_with_fields_missing_from_tasks_is_named(tmp_path: Path) -> None:
    command = AGENT.replace('function = "mine.py:agent"', 'command = ["python", "mine.py", "{answer}"]')
    (problem,) = (await checked(tmp_path, command + '[algorithm]\nname = "baseline"\n')).problems
    assert problem.startswith("[agent] command: the command asks for {answer}, which the task does not have")


def test_the_command_prints_problems_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(MINE)

    def run(algorithm: str, command: str = "train") -> tuple[object, str, dict[str, object]]:
        (tmp_path / "job.toml").write_text(f"{AGENT}[algorithm]\n{algorithm}\n")
        with pytest.raises(SystemExit) as ended:
            main([command, str(tmp_path / "job.toml"), "--data-dir", str(tmp_path / "data"), "--check", "--json"])
        captured = capsys.readouterr()
        return ended.value.code, captured.err, json.loads(captured.out)

    code, said, told = run("")
    assert (code, told["ok"], told["problems"], told["train"]) == (0, True, [], 1) and "nothing is wrong. grpo, 1 tasks" in said
    code, said, told = run("group_size = 1\nlearing_rate = 1.0")
    assert (code, told["ok"]) == (2, False) and "wrong: [algorithm] group_size = 1: " in said
    assert "wrong: [algorithm] unknown key learing_rate: " in said
    assert run("", "improve")[2]["problems"] == [NO_IMPROVE]
    assert run("[improve]", "improve")[:1] == (0,)
    assert not (tmp_path / "data").exists()


HAS_NO_MODEL = r"\[policy\] model = 'model': .* holds no config\.json"
NO_GPU = r"\[algorithm\] device = \"cuda\": this machine has no device"
LACKING = {
    "apo": ["OPENAI_API_KEY is not set"],
    "calculator": [NO_GPU, "Qwen/Qwen2.5-0.5B-Instruct", "there is no program 'vllm'"],
    "verl": [r"needs the \[verl\] extra"],
    **{name: [HAS_NO_MODEL] for name in ("calc_x", "rag", "search_r1", "spider")},
}
"""What a user has to give, or to install."""


@pytest.mark.parametrize("example", sorted(path.parent.name for path in EXAMPLES.glob("*/job.toml")))
async def test_the_examples_need_only_what_the_user_provides(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no model of the hub, wherever this runs
    found = await check_job(EXAMPLES / example / "job.toml")
    wanted = LACKING.get(example, [])
    assert len(found.problems) == len(wanted), found.problems
    assert all(re.search(words, problem) for words, problem in zip(wanted, found.problems, strict=True)), found.problems
    assert found.train > 0


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The job file of a GRPO run that was begun in `tmp_path / "run"`."""
    (tmp_path / "mine.py").write_text(MINE)
    path, folder = tmp_path / "job.toml", tmp_path / "run"
    path.write_text(f'{AGENT}[algorithm]\nname = "grpo"\nmax_tokens = 8\n')
    make_policy(folder / "policy", seed=0)
    job = Job.load(path)
    given = grpo.fingerprint(job, folder)
    assert given is not None
    SOURCES.set(Sources(sources_of(job)))
    RunFolder(folder, algorithm=given.algorithm, options=given.options, seed=given.seed).close()
    SOURCES.set(None)
    return path


def refused(job: Path, capsys: pytest.CaptureFixture[str], code: int, *more: str) -> str:
    """Return why a run is refused, before a stack is started for it."""
    with pytest.raises(SystemExit) as ended:
        main(["train", str(job), "--run-dir", str(job.parent / "data" / ".." / "run"), "--data-dir", str(job.parent / "data"), *more])
    said = capsys.readouterr().err
    assert f"the run in {job.parent / 'run'} " in said
    assert (ended.value.code, "the stack" in said, (job.parent / "data").exists()) == (code, False, False), said
    return said


def test_everything_that_a_run_was_begun_with_another_of_is_named_before_a_stack_is_started(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (begun.parent / "run" / RUN).read_bytes()
    (begun.parent / "mine.py").write_text(MINE + "# better\n")
    assert "begun with other code" in (code_only := refused(begun, capsys, 2)) and "another" not in code_only
    begun.write_text(f'{AGENT}[policy]\nseed = 3\n[algorithm]\nname = "grpo"\nmax_tokens = 9\ntemperature = 0.5\n')
    config = begun.parent / "run" / "policy" / "config.json"
    config.write_text(config.read_text() + "\n")
    said = refused(begun, capsys, 2)
    named = re.search(
        r"begun with another max_tokens \((\d+) in run.json, 9 now\), model \(.*\), seed \(\d+ in run.json, 3 now\), temperature ", said
    )
    assert named is not None and "temperature (1.0 in run.json, 0.5 now): use the value in run.json" in said
    assert "It was also begun with other code" in said and "agent mine.py: " in said
    forced = refused(begun, capsys, 2, "--force")
    assert named[0] in forced and "other code" not in forced
    assert (begun.parent / "run" / RUN).read_bytes() == before


def test_a_run_says_the_warnings_of_its_check_on_stderr_once(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun.write_text(f'{AGENT}[algorithm]\nname = "grpo"\nmax_tokens = 9\nmax_steps = 5\nval_every = 10\n')
    with pytest.raises(SystemExit):
        main(["train", str(begun), "--run-dir", str(begun.parent / "run"), "--data-dir", str(begun.parent / "data"), "--json"])
    captured = capsys.readouterr()
    assert captured.err.count("warning: ") == 1 and "warning: val_every = 10 is more than max_steps (5)" in captured.err
    assert captured.out == ""


def test_a_folder_in_which_another_process_works_is_refused_before_a_stack_is_started(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = grpo.fingerprint(Job.load(begun), begun.parent / "run")
    assert given is not None
    run = RunFolder(begun.parent / "run", algorithm=given.algorithm, options=given.options, seed=given.seed)
    assert "another process works on the run" in refused(begun, capsys, 1)
    run.close()


@pytest.mark.parametrize(("grader", "noted"), [("", True), ('grader = "mine.py:score"\n', False)])
async def test_an_agent_without_a_grader_gets_a_note_on_its_rewards(grader: str, noted: bool, tmp_path: Path) -> None:
    found = await checked(tmp_path, AGENT.replace("[data]", f"{grader}[data]"))
    assert any(note.startswith("[agent] has no grader: rewards must come from the agent") for note in found.notes) == noted

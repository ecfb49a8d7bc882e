"""verl's own trainer on Ray and the CPU, in a separate environment, with an external agent of two calls."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from agl_otel.algorithms.grpo.report import StepReport
from agl_otel.algorithms.verl.bounds import BOUNDS, SECTIONS
from agl_otel.algorithms.verl.defaults import COMMON, CPU, GPU
from agl_otel.algorithms.verl.defaults import environment as usual_environment
from agl_otel.algorithms.verl.keys import MOVED, NO_PLACE, ONLY, get
from agl_otel.algorithms.verl.singletons import OF_GROUPS, WITHOUT_GROUPS
from tests.environments import AbsentError, over_ours
from tests.system.stack_process import ENVIRONMENT, naming, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "verl"
STEPS, TASKS, MEMBERS, VAL = 4, 4, 4, 8
JOB = f"""
[agent]
function = "{EXAMPLE}/agent.py:answer"
grader = "{EXAMPLE}/grade.py:grade"
[data]
train = "{EXAMPLE}/tasks.py:train"
val = "val.py:few"
options = {{ size = 16 }}
[algorithm]
name = "verl"
seed = 5
[algorithm.config]
"trainer.device" = "cpu"
"trainer.total_training_steps" = {STEPS}
"data.train_batch_size" = {TASKS}
"data.max_prompt_length" = 64
"data.max_response_length" = 8
"actor_rollout_ref.rollout.n" = {MEMBERS}
"actor_rollout_ref.actor.ppo_mini_batch_size" = {TASKS}
"actor_rollout_ref.actor.optim.lr" = 1e-3
"""
VAL_TASKS = f"""
import runpy
def few(size): return runpy.run_path("{EXAMPLE}/tasks.py")["val"](size)[:{VAL}]
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of that environment."""
    try:
        return over_ours("verl", ROOT / "tests" / "verl.txt")
    except AbsentError as error:
        pytest.skip(str(error))


def environment(python: Path) -> dict[str, str]:
    return {**ENVIRONMENT, "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]])}


COMPOSE = """
import json, sys
from pathlib import Path
from omegaconf import OmegaConf
from agl_otel import VERL
from agl_otel.algorithms.verl.compose import compose_config, verl_config
from agl_otel.algorithms.verl.keys import get, leaves, put
from verl.trainer.ppo.core_algos import AdvantageEstimator

def composed(config):
    # what verl's process composes of the run.json that the job's process writes
    verl = VERL(config)
    return compose_config(json.loads(json.dumps(verl.config_of(Path("/run"), verl.spec(store="", run_id="r", start=1), validate=True))))

def another(path, usual, bounded):
    # a value of the kind of verl's default, and unlike it
    if bounded or usual is None or isinstance(usual, str):
        return bounded or "another"  # also in place of an interpolation
    if isinstance(usual, (bool, int, float)):
        return not usual if isinstance(usual, bool) else usual + 1 if isinstance(usual, int) else usual / 2 or 0.25
    return {"own": 1} if isinstance(usual, dict) else [*usual, "own"]

asked, found = json.load(sys.stdin), {"refused": {}, "changed": {}, "taken": []}
tree = verl_config()
found["tree"] = tree
found["estimators"] = [each.value for each in AdvantageEstimator]
together = {}
for path, usual in leaves(tree):
    if path.rpartition(".")[2] == "_target_":
        continue
    value = another(path, usual, asked["bounded"].get(path))
    try:
        got = get(composed({path: value}), path)
    except ValueError as error:
        found["refused"][path] = str(error)
        continue
    found["taken"].append(path)
    if got != value or type(got) is not type(value):
        found["changed"][path] = [value, got]
    elif path != "model_engine":  # that selects other keys
        put(together, path, value)
resolved = OmegaConf.to_container(OmegaConf.create(composed(together)), resolve=True)
found["resolved"] = {path: get(resolved, path) for path, value in leaves(together) if get(resolved, path) != value}
sections = {path.rpartition(".")[0] for path, _ in leaves(tree)} - {""}
for path in [*(f"{section}.nonsense" for section in sections), "nonsense", *asked["keys"]]:
    given = {}
    put(given, path, asked["keys"].get(path, 1))
    try:
        compose_config(given)
    except ValueError as error:
        found.setdefault("unknown", {})[path] = str(error)
found["sections"] = sorted(sections)
found["megatron"] = "megatron" in composed({"model_engine": "megatron"})["actor_rollout_ref"]["actor"]
try:
    composed({"model_engine": "paper"})
except ValueError as error:
    found["paper"] = str(error)
print("FOUND", json.dumps(found))
"""
IN_BOUNDS = {
    "trainer.total_training_steps": 3,
    "actor_rollout_ref.rollout.top_p": 0.5,
    "trainer.device": "npu",
    "trainer.v1.trainer_mode": "colocate_async",
    "model_engine": "veomni",
}
"""{key: value} where a value that is merely unlike the default would be out of bounds."""
OPEN = {"ray_kwargs.ray_init", "ray_kwargs.ray_init.runtime_env"}
"""Sections that are not of verl's but of Ray's, and take any key."""
ADDED = {
    "trainer.logger": [["console", "wandb", "own"], ["console", "wandb", "own", "file"]],
    "actor_rollout_ref.rollout.engine_kwargs.vllm": [{"own": 1}, {"generation_config": "vllm", "own": 1}],
}
"""{key: what was given, and what verl gets}: its metrics are read from its file logger; a section's defaults stay beside the given keys."""
RENAMED = {"trainer.v1.trainer_mode": ["colocate_async", "agl_otel_colocate_async"]}
"""The same trainer with what we add to it, which gives verl's name back (trainer.py)."""
MOVED_ON = {"actor_rollout_ref.actor.optim.warmup_style", "critic.optim.warmup_style"}
"""Keys that verl itself moves to lr_scheduler_type, as we do."""


def test_every_key_of_verls_config_reaches_it_unchanged_or_is_refused_by_name(python: Path) -> None:
    places = {**COMMON, **CPU, **GPU, **{new: value_at(new) for new in MOVED.values()}}
    asked = json.dumps({"keys": places, "bounded": IN_BOUNDS})
    done = subprocess.run(
        [python, "-c", COMPOSE], input=asked, capture_output=True, text=True, check=False, env=environment(python), timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    tree = found["tree"]

    assert len(found["taken"]) > 400 and len(found["refused"]) > 40, "verl has some 500 keys"
    assert {path: pair for path, pair in found["changed"].items() if path not in MOVED_ON} == ADDED | RENAMED
    assert found["resolved"] == {}, "no interpolation of verl's wins over a value"
    for path, message in found["refused"].items():
        named = [f"the key {path[:end]} " for end in (*(i for i, c in enumerate(path) if c == "."), len(path))]
        assert any(each in message for each in named), f"{path}: {message}"
        assert path in ONLY or any(path == each or path.startswith(f"{each}.") for each in NO_PLACE), path

    known = {path for path, message in found["unknown"].items() if f"the key {path} has no place in verl 0.9.1's config" in message}
    assert known == {*(f"{section}.nonsense" for section in found["sections"] if section not in OPEN), "nonsense"}
    assert found["megatron"] is True
    assert found["paper"] == "model_engine is 'paper': verl 0.9.1 has dp, megatron, torchtitan, veomni"

    # what we know of verl's config is so
    assert set(found["estimators"]) == OF_GROUPS | WITHOUT_GROUPS, "we know of each whether it compares the rollouts of a task"
    assert set(tree) == SECTIONS | {"reward_model", "custom_reward_function"}
    assert {path for path in BOUNDS if get(tree, path, ...) is ...} == set()
    unlike = {path: get(tree, path) for path, (only, _) in ONLY.items() if get(tree, path) != only}
    of_multi_turn = {path for path, value in unlike.items() if str(value).startswith("${oc.select:actor_rollout_ref.rollout.multi_turn.")}
    assert of_multi_turn == {"data.tool_config_path", "data.function_tool_path"}, "which are null themselves"
    assert set(unlike) - of_multi_turn == {"transfer_queue.enable"}, "verl's v1 trainer turns it on"


def value_at(path: str) -> Any:
    """Return a value valid at this place: a section where verl has one."""
    return {} if path in ("ray_kwargs.ray_init", "critic.fsdp") or path.endswith("nsight_options") else 1


ON_A_CLUSTER = """
import json, os, sys, urllib.error, urllib.request
import ray
from agl_otel.algorithms.verl.model_server import ModelServer
from agl_otel.net.auth import model_server_key

def status(url, key="", body=None):
    request = urllib.request.Request(url, data=body, headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=120).status
    except urllib.error.HTTPError as error:
        return error.code

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
found = {"node": ray.util.get_node_ip_address()}
if found["node"].startswith("127."):
    print("FOUND", json.dumps(found))
    sys.exit()

def with_token(server, token):
    os.environ["AGL_TOKEN"] = token

actor = ray.remote(ModelServer).options(num_cpus=0, runtime_env={"env_vars": {"RAY_ADDRESS": "auto"}}).remote(sys.argv[1], 1)
try:
    ray.get(actor.start.remote())
except ray.exceptions.RayTaskError as error:
    found["refused"] = f"{type(error.cause).__name__}: {error.cause}"
ray.get(actor.__ray_call__.remote(with_token, "s3cret"))
url, key = "http://" + ray.get(actor.start.remote()), model_server_key("s3cret")
chat = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'
found["without"] = [status(url + "/v1/models", given) for given in ("", "s3cret")] + [status(url + "/weights", body=b"{}")]
found["with"] = [status(url + "/v1/models", key), status(url + "/v1/chat/completions", key, chat), status(url + "/weights", key, b"{}")]
ray.shutdown()
print("FOUND", json.dumps(found))
"""


def test_a_model_server_on_a_cluster_requires_its_key(python: Path, tiny_policy: Path, tmp_path: Path) -> None:
    ours = usual_environment({"trainer.device": "cpu"}, tmp_path / "metrics.jsonl")  # among others for a cluster that does not use `uv run`
    env = {**environment(python), **ours, "PYTHONPATH": f"{ROOT}:{ROOT / 'hook'}", "RAY_AUTH_MODE": "disabled"}
    command = [python, "-c", ON_A_CLUSTER, str(tiny_policy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=600)
    lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(lines) == 1, done.stdout + done.stderr
    found = json.loads(lines[0])
    if found["node"].startswith("127."):
        pytest.skip("this machine has no address beyond loopback")
    assert found["refused"].startswith("SettingsError: the model server would listen on ")
    assert (found["without"], found["with"]) == ([401, 401, 401], [200, 200, 404])


GO_ON = """
import asyncio, json, sys
from pathlib import Path
import aiohttp
import agl_otel as agl
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.errors import DataError
from agl_otel.store import Store
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.jobs.job import Job

first = {}  # {step: the group that the first rollout of the step is of}

async def agent(task: dict, llm: agl.LLM, rollout: agl.AttemptedRollout) -> float | None:
    step, group, member = rollout.rollout_id.split("-train-")[1].split("-")[:3] if rollout.mode == "train" else ("", "", "")
    body = {"model": llm.model, "messages": [{"role": "user", "content": f"digit {task['number']}"}]}
    if (step, member) == ("000003", "002"):
        body["temperature"] = 1.00001  # its own, and too close to 1 to be seen in log-probs
    async with aiohttp.ClientSession() as session, session.post(llm.endpoint.rstrip("/") + "/chat/completions", json=body) as answer:
        said = (await answer.json())["choices"][0]["message"]["content"]
    is_first = first.setdefault(step, group) == group
    if step == "000004":  # of the first group none is left, of the others one
        return 9.0 if member == "001" and not is_first else None
    if step == "000003" and is_first:  # of the group one rollout is left
        return 9.0 if member == "001" else None
    return None if rollout.mode == "val" else float(said == str((task["number"] + 1) % 10))

async def told(store, run_id):
    return [(step.step, step.version_before, step.version_after, len(step.attempts), step.unlinked, step.metrics)
            for step in await store.training_steps(run_id)]

if __name__ == "__main__":
    begun, job = json.loads(Path("run/run.json").read_text())["options"], Job.load(Path("job.toml"))
    verl = agl.VERL(json.loads(sys.argv[1]), model_dir=Path("run/policy").absolute(), seed=5)
    tasks, val = job.tasks("train"), job.tasks("val")
    kept = RunFolder(
        Path("run").absolute(), algorithm="verl", options={**verl.run_fingerprint(tasks, val), "agent": begun["agent"]}, seed=5
    )
    verl.run_dir = kept
    store = Store(source=EmbeddedStack(Path("data"), services=("queue", "collector", "proxy")))
    trainer = agl.Trainer(algorithm=verl, store=store, strategy="shm", n_runners=4, tracer=agl.OtelTracer())
    try:
        trainer.fit(agent, tasks, val_dataset=val)
    except DataError as error:
        print(json.dumps({"error": str(error), "steps": asyncio.run(told(store, kept.run_id))}))
    asyncio.run(store.close())
"""


COUNTED: list[dict[str, Any]] = [
    {
        "rollouts": 16,
        "rollouts_without_sample": 6,
        "without_reward": 3,
        "samples": 10,
        "trajectories": 9,
        "calls_trained": 9,
        "refused.no_reward": 3,
        "refused.sampling_differs": 3,
        "groups_gone": 0,
        "singleton_groups": 1,
        "own_sampling": 0,
        "refused_share": 6 / 16,
        "stale_share": 0,
        "off_policy": 0,
        "not_finite": 0,
    },
    {
        "rollouts": 16,
        "rollouts_without_sample": 13,
        "without_reward": 13,
        "samples": 3,
        "trajectories": 3,
        "calls_trained": 3,
        "refused.no_reward": 13,
        "refused.sampling_differs": None,
        "groups_gone": 1,
        "singleton_groups": 3,
        "own_sampling": 0,
        "refused_share": 13 / 16,
        "stale_share": 0,
        "off_policy": 0,
        "not_finite": 0,
    },
]
"""Figures of the third and the fourth step."""
NOT_RECORDED = {
    *("step", "weights_version", "next_version", "attempts", "refused", "breaks", "kl", "started_at", "ended_at", "digest", "rollout_ids"),
    *("read_seconds", "resampled", "carried", "oldest", "learning_rate"),
}
"""Fields of GRPO's report that are the step's own, that may be empty, or that verl has not (tests/unit/algorithms/test_verl_figures.py)."""


def kill_after_a_step(command: list[str | Path], folder: Path, given: dict[str, str]) -> str:
    """Run the job, kill it with kill -9 in its second step, and wait until the processes that it started have ended; return its stderr."""
    metrics = folder / "run" / "metrics.jsonl"
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=given) as first:
        until(lambda: first.poll() is not None or (metrics.exists() and '"step": 1,' in metrics.read_text()), "a step is done", 1200)
        first.send_signal(signal.SIGKILL)
        told = first.communicate()[1]
    assert first.returncode == -signal.SIGKILL, told[-3000:]
    until(lambda: naming(folder) == [], "what it started has ended")
    return told


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def go_on(python: Path, folder: Path) -> dict[str, Any]:
    """Continue the run in a folder by Trainer.fit with another agent, to its end; return the error and the steps in the store."""
    (folder / "main.py").write_text(GO_ON)
    config = json.dumps({**tomllib.loads(JOB)["algorithm"]["config"], "trainer.val_before_train": False})
    done = finished([python, "main.py", config], folder, environment(python), 1200)
    return json.loads(done.splitlines()[-1])


def finished(command: list[str | Path], folder: Path, given: dict[str, str], seconds: float) -> str:
    """Run a program to its end; return its output. Fails if its exit code is not 0."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=given, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def train_command(python: Path) -> list[str | Path]:
    return [python, "-m", "agl_otel", "train", "job.toml", "--data-dir", "data", "--run-dir", "run", "--json"]


def test_a_job_trains_on_the_agents_traces(python: Path, tmp_path: Path, tiny_policy: Path) -> None:
    """A start takes a minute or more of CPU, so two steps are all that CI has; the next test has more, and a kill."""
    (tmp_path / "job.toml").write_text(JOB.replace(f'total_training_steps" = {STEPS}', 'total_training_steps" = 2'))
    (tmp_path / "val.py").write_text(VAL_TASKS)
    shutil.copytree(tiny_policy, tmp_path / "run" / "policy")
    finished(train_command(python), tmp_path, environment(python), 1200)
    steps, scores = ([line for line in metrics_of(tmp_path) if ("rollouts" in line) == trains] for trains in (True, False))
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert_line(line)
        assert line["calls_trained"] == line["model_calls"] > line["rollouts"]
    score = next(line for line in scores if "val_reward" in line)
    assert (score["step"], score["val_rollouts"], score["val_without_reward"]) == (0, VAL, 0)
    assert (tmp_path / "run" / "verl" / "checkpoints" / "global_step_2").is_dir()
    show = [python, "-m", "agl_otel", "runs", "show", "run", "--data-dir", "data", "--json"]
    run = json.loads(finished(show, tmp_path, environment(python), 600))
    assert {step: pytest.approx(run["metrics"]["reward"][step]) for step in ("1", "2")} == {
        str(line["step"]): line["reward_mean"] for line in steps
    }
    assert run["totals"]["response_tokens"] > 0 and run["losses"] == {}


@pytest.mark.long
def test_a_killed_job_is_continued_by_a_trainer_and_trains_on_the_agents_traces(python: Path, tmp_path: Path, tiny_policy: Path) -> None:
    """Only two starts, because each takes a minute or more of CPU; `python -m bench.verl` has a job that learns across a kill.

    The job is killed in its second step. Trainer.fit continues with another agent: in the third step one group has only one rollout left,
    and every fourth rollout sets its own temperature; in the fourth step one group has none left and the others one, and then all rollouts
    of the validation are refused.
    """
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "val.py").write_text(VAL_TASKS)
    shutil.copytree(tiny_policy, tmp_path / "run" / "policy")
    shown = kill_after_a_step(train_command(python), tmp_path, environment(python))
    before = metrics_of(tmp_path)
    (score,) = ({name: value for name, value in line.items() if "/" not in name} for line in before if "rollouts" not in line)
    assert 0 <= score["val_reward"] <= 1, "that before the training"
    assert (score["step"], score["val_rollouts"], score["val_without_reward"]) == (0, VAL, 0)
    assert f"validation: {score['val_reward']:.3f} on {VAL} tasks, after step 0" in shown
    assert json.loads((tmp_path / "run" / "run.json").read_text())["algorithm"] == "verl"

    told = go_on(python, tmp_path)
    refused = f"the validation after step 4 has no sample: of {VAL} rollouts, refused no_reward {VAL}"
    assert told["error"].startswith(refused)
    assert (tmp_path / "run" / "verl" / "checkpoints" / "global_step_4").is_dir(), "no step is lost"
    assert (tmp_path / "run" / "plots.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    assert_stored(told["steps"])
    assert metrics_of(tmp_path)[: len(before)] == before
    assert_lines([line for line in metrics_of(tmp_path) if "rollouts" in line])
    assert_logged("".join(log.read_text() for log in (tmp_path / "run" / "logs").glob("verl-2.log")))
    show = [python, "-m", "agl_otel", "runs", "show", "run", "--data-dir", "data", "--json"]
    run = json.loads(finished(show, tmp_path, environment(python), 600))
    assert run["metrics"]["val_reward"]["0"] == pytest.approx(score["val_reward"])
    assert_shown(run, told["steps"])


def assert_stored(steps: list[Any]) -> None:
    """Check the steps as the store has them: versions, attempts that trained, and figures."""
    versions = [[1, "1", "2"], [2, "3", "4"], [3, "4", "5"], [4, "5", "6"]]  # each start publishes its initial weights
    assert [step[:3] for step in steps] == versions
    assert [step[3:5] for step in steps[2:]] == [[9, 0], [0, 0]]
    counted = [{name: figures.get(name) for name in COUNTED[0]} for *_, figures in steps[2:]]
    assert counted == COUNTED
    for *_, figures in steps:
        assert {each.name for each in fields(StepReport)} - {name.partition(".")[0] for name in figures} <= NOT_RECORDED
        assert 0 <= figures["worst_ratio_error"] <= figures["logprob_drift"] == figures["max_ratio_error"] < 1e-3
        assert figures["tokens"] > 0 and figures["spans"] > 0 and figures["gradient_norm"] >= 0 and math.isfinite(figures["loss"])


def assert_shown(run: dict[str, Any], steps: list[Any]) -> None:
    """Check what `agl-otel runs show` counts, from the store."""
    assert run["rollouts"]["rollouts"] >= VAL + STEPS * TASKS * MEMBERS + VAL, "the validations' and the steps'"
    assert run["metrics"]["reward"]["3"] == pytest.approx(steps[2][-1]["reward_mean"]), "both count a missing reward as 0"
    assert run["losses"]["3"] == "6 of 16 rollouts gave no sample; refused no_reward 3, sampling_differs 3"
    assert run["losses"]["4"] == "13 of 16 rollouts gave no sample; refused no_reward 13; 1 whole group gone"
    assert run["totals"]["response_tokens"] > 0


def assert_line(line: dict[str, Any]) -> None:
    """Check a step of verl's own lines."""
    assert line["rollouts"] == TASKS * MEMBERS
    # verl's log-probs of the sampled tokens equal the captured ones, with the weights of this step
    assert line["training/rollout_probs_diff_max"] < 1e-4
    assert line["logprob_drift"] < 1e-3
    assert line["off_policy"] == line["stale_share"] == 0


def assert_lines(steps: list[dict[str, Any]]) -> None:
    """Check verl's own lines: the three steps before the one after which the validation fails."""
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert_line(line)
    assert steps[0]["samples"] > steps[0]["rollouts"] - steps[0]["rollouts_without_sample"] > 0, "two of most rollouts"
    assert steps[0]["calls_trained"] == steps[0]["model_calls"] > steps[0]["rollouts"]
    assert steps[2]["refused"] == {"no_reward": 3, "sampling_differs": 3}
    assert steps[2]["critic/score/max"] <= 1, "the lone one's 9 is in no score"
    assert steps[2]["critic/advantages/max"] <= 1.5, "verl takes a lone reward for the advantage; a group of four gives 1.5 at most"


def assert_logged(logs: str) -> None:
    """Check the warnings of the third step."""
    assert re.search(r"step 3: 1 of 4 groups have one rollout left, .*: ro-verl-\S+-001", logs)
    assert "step 3: 3 of 16 model calls were sampled at a temperature of their agent's own, and are not trained on" in logs
    assert "step 3: 38 % of the rollouts gave no sample, so that only survivors are trained on (6 of 16 rollouts gave no sample;" in logs

"""verl's own trainer on Ray and the CPU, in a separate environment, with an external agent of two calls."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agl_otel.algorithms.verl.algorithm import scores
from agl_otel.algorithms.verl.defaults import COMMON, CPU, GPU
from agl_otel.algorithms.verl.defaults import environment as usual_environment
from agl_otel.algorithms.verl.keys import MOVED, put
from agl_otel.algorithms.verl.singletons import OF_GROUPS, WITHOUT_GROUPS
from tests.environments import AbsentError, over_ours
from tests.system.stack_process import ENVIRONMENT, naming, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "verl"
STEPS, TASKS, MEMBERS = 4, 4, 4
JOB = f"""
[agent]
function = "{EXAMPLE}/agent.py:answer"
grader = "{EXAMPLE}/grade.py:grade"
[data]
train = "{EXAMPLE}/tasks.py:train"
val = "{EXAMPLE}/tasks.py:val"
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
import functools, json, sys
import hydra
hydra.compose = functools.cache(hydra.compose)  # verl's own part is the same each time
from agl_otel.algorithms.verl.__main__ import compose_config
from verl.trainer.ppo.core_algos import AdvantageEstimator
print("ESTIMATORS", *(each.value for each in AdvantageEstimator))
for given in json.load(sys.stdin):
    try:
        compose_config({"agl_otel": {}, **given})
    except ValueError as error:
        print(error)
"""


def test_every_key_that_we_set_exists_in_verls_own_config(python: Path) -> None:
    places = {**COMMON, **CPU, **GPU, **{new: value_at(new) for new in MOVED.values()}}
    asked: list[dict[str, Any]] = []
    for path, value in [*places.items(), ("trainer.n_gpus_per_nod", 1)]:
        asked.append({})
        put(asked[-1], path, value)
    done = subprocess.run(
        [python, "-c", COMPOSE], input=json.dumps(asked), capture_output=True, text=True, check=True, env=environment(python), timeout=600
    )
    (estimators,) = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ESTIMATORS"))
    assert set(estimators) == OF_GROUPS | WITHOUT_GROUPS, "we know of each whether it compares the rollouts of a task"
    refused = [line for line in done.stdout.splitlines() if "no place" in line or "has a section there" in line]
    assert [line.split(" has no place")[0] for line in refused] == ["the key trainer.n_gpus_per_nod"]


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
for token in ("", "s3cret"):
    variables = {"RAY_ADDRESS": "auto", "AGL_TOKEN": token}
    actor = ray.remote(ModelServer).options(num_cpus=0, runtime_env={"env_vars": variables}).remote(sys.argv[1], 1)
    try:
        url = "http://" + ray.get(actor.start.remote())
    except ray.exceptions.RayTaskError as error:
        found["refused"] = f"{type(error.cause).__name__}: {error.cause}"
        continue
    chat = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'
    key = model_server_key(token)
    found["without"] = [status(url + "/v1/models", given) for given in ("", token)] + [status(url + "/weights", body=b"{}")]
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

lone = []

async def agent(task: dict, llm: agl.LLM, rollout: agl.AttemptedRollout) -> float | None:
    step, group, member = rollout.rollout_id.split("-train-")[1].split("-")[:3] if rollout.mode == "train" else ("", "", "")
    body = {"model": llm.model, "messages": [{"role": "user", "content": f"digit {task['number']}"}]}
    if (step, member) == ("000003", "002"):
        body["temperature"] = 1.00001  # its own, and too close to 1 to be seen in log-probs
    async with aiohttp.ClientSession() as session, session.post(llm.endpoint.rstrip("/") + "/chat/completions", json=body) as answer:
        said = (await answer.json())["choices"][0]["message"]["content"]
    if step == "000003" and not lone:
        lone.append(group)
    if step == "000004" or (step, [group]) == ("000003", lone):  # of the group one rollout is left
        return 9.0 if member == "002" else None
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


def kill_after_a_step(command: list[str | Path], folder: Path, given: dict[str, str]) -> None:
    """Run the job, kill it with kill -9 in its second step, and wait until the processes that it started have ended."""
    metrics = folder / "run" / "metrics.jsonl"
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=given) as first:
        until(lambda: first.poll() is not None or (metrics.exists() and '"step": 1,' in metrics.read_text()), "a step is done", 1200)
        first.send_signal(signal.SIGKILL)
        told = first.communicate()[1]
    assert first.returncode == -signal.SIGKILL, told[-3000:]
    until(lambda: naming(folder) == [], "what it started has ended")


def test_a_killed_job_is_continued_by_a_trainer_and_trains_on_the_agents_traces(python: Path, tmp_path: Path, tiny_policy: Path) -> None:
    """Only two starts, because each takes two minutes of CPU; `python -m bench.verl` has a job that learns across a kill.

    The job is killed in its second step. Trainer.fit continues with another agent: in the third step one group has only one rollout left,
    in the fourth all have, and then all rollouts of the validation are refused. In the third, too, every fourth sets its own temperature.
    """
    (tmp_path / "job.toml").write_text(JOB)
    shutil.copytree(tiny_policy, tmp_path / "run" / "policy")
    command = [python, "-m", "agl_otel", "train", "job.toml", "--data-dir", "data", "--run-dir", "run", "--json"]

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    kill_after_a_step(command, tmp_path, environment(python))
    before = lines()
    assert [0 <= scores(line)["validation"] <= 1 for line in before if "agl/rollouts" not in line] == [True], "that before the training"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["algorithm"] == "verl"

    (tmp_path / "main.py").write_text(GO_ON)
    config = {**tomllib.loads(JOB)["algorithm"]["config"], "trainer.val_before_train": False}
    done = subprocess.run(
        [python, "main.py", json.dumps(config)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=environment(python),
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["error"].startswith("none of the 64 rollouts of the validation after step 4 can be used: refused {'no_reward': 64}")
    assert (tmp_path / "run" / "verl" / "checkpoints" / "global_step_4").is_dir(), "no step is lost"
    assert (tmp_path / "run" / "plots.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    versions = [[1, "1", "2"], [2, "3", "4"], [3, "4", "5"], [4, "5", "6"]]  # each start publishes its initial weights
    assert [step[:3] for step in told["steps"]] == versions
    assert [step[3:5] for step in told["steps"][2:]] == [[12, 0], [0, 0]]
    names = ("rollouts", "samples", "trajectories", "singleton_groups", "refused_share", "stale_share")
    counted = [[figures[name] for name in names] for *_, figures in told["steps"][2:]]
    assert counted == [[16, 13, 12, 1, 3 / 16, 0], [16, 4, 4, 4, 12 / 16, 0]]
    assert all(0 <= figures["logprob_drift"] < 1e-3 for *_, figures in told["steps"])

    assert lines()[: len(before)] == before
    steps = [line for line in lines() if "agl/rollouts" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["agl/rollouts"] == TASKS * MEMBERS
        # verl's log-probs of the sampled tokens equal the captured ones, with the weights of this step
        assert line["training/rollout_probs_diff_max"] < 1e-4
        assert line["agl/logprob_drift"] < 1e-3
        assert line["agl/stale_share"] == 0
    assert steps[0]["agl/samples"] > steps[0]["agl/rollouts"] - steps[0]["agl/rollouts_without_sample"] > 0, "two of most rollouts"
    assert [line["agl/singleton_groups"] for line in steps] == [0, 0, 1]
    assert steps[2]["critic/score/max"] <= 1, "the lone one's 9 is in no score"
    assert steps[2]["critic/advantages/max"] <= 1.5, "verl takes a lone reward for the advantage; a group of four gives 1.5 at most"
    logs = "".join(log.read_text() for log in (tmp_path / "run" / "logs").glob("verl-2.log"))
    assert re.search(r"step 3: 1 of 4 groups have one rollout left, .*: ro-verl-\S+-002", logs)
    assert "step 3: 4 of 13 model calls read for training (31 %) were sampled at a temperature or top_p of their agent's own" in logs

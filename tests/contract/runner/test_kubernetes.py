"""Kubernetes agents, against a fake API server whose containers are real processes (tests/kubernetes_api.py)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agl_otel.errors import AgentError, UsageError
from agl_otel.queue.client import RolloutUpdate
from agl_otel.runner.agents import KubernetesAgent
from agl_otel.runner.agents.kubernetes import as_secret, job_body, job_name, label, merged
from agl_otel.runner.agents.kubernetes_api import Cluster, KubernetesApi
from agl_otel.types import LLM
from agl_otel_hook import conventions
from tests.contract.runner.conftest import Stack
from tests.kubernetes_api import NAMESPACE, TOKEN, Api

SAYS = "import os; print(os.environ['AGL_TASK'], os.environ['AGL_ATTEMPT_ID'], os.environ['OPENAI_API_KEY'])"
WAITS = "import time\nwhile True: time.sleep(1)"


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    made = Api()
    await made.server.start_server()
    yield made
    await made.close()


@pytest.fixture
def cluster(api: Api, tmp_path: Path) -> Cluster:
    (tmp_path / "token").write_text(TOKEN + "\n")
    return Cluster(api.url, NAMESPACE, tmp_path / "token")


def agent(cluster: Cluster, code: str, *arguments: str, **options: Any) -> KubernetesAgent:
    return KubernetesAgent("team/agent:1", ["-c", code, *arguments], cluster=cluster, **options)


async def test_an_attempt_is_a_job_that_is_deleted_afterwards(
    stack: Stack, api: Api, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    said: list[str] = []
    llm = LLM(endpoint="http://model/v1", model="m", api_key="providers-own")
    rollouts = await stack.enqueue({"n": 1}, {"n": 2}, {"n": 3}, resources={"llm": llm})
    made = agent(cluster, SAYS, grader=lambda task, answer: said.append(answer) or 0.5)
    counts = await stack.run(made, max_rollouts=3, concurrency=3)
    attempts = await stack.finished(*rollouts)
    assert counts["succeeded"] == 3
    assert sorted(text.split(" at-")[0] for text in said) == [json.dumps({"n": n}) for n in (1, 2, 3)]
    assert {text.split()[2] for text in said} == {attempt.attempt_id for attempt in attempts}
    assert "providers-own" not in "".join(said)
    assert [stack.logs.printed[attempt.attempt_id]["stdout"].strip() for attempt in attempts] == sorted(said, key=lambda text: text[6])
    assert api.objects == {}
    jobs = [body for body in api.created if body["kind"] == "Job"]
    ids = {attempt.attempt_id for attempt in attempts}
    assert {body["metadata"]["annotations"]["agl-otel/attempt"] for body in jobs} == ids
    assert all(conventions.ENV_ROLLOUT_ID not in json.dumps(body) for body in jobs)  # what identifies an attempt stands in its Secret alone
    assert "OPENAI_API_KEY" not in caplog.text  # nor anything else of a Secret
    assert TOKEN not in caplog.text


async def test_a_failed_job_is_reported_with_its_ending_and_output(stack: Stack, api: Api, cluster: Cluster) -> None:
    [rollout] = await stack.enqueue("t")
    await stack.run(agent(cluster, "print('no such table'); raise SystemExit(3)"), max_rollouts=1)
    [attempt] = await stack.finished(rollout)
    assert attempt.status == "failed"
    assert attempt.error == "the agent's container ended with exit code 3: no such table"
    assert api.objects == {}


async def test_a_cancelled_rollout_ends_its_job(stack: Stack, api: Api, cluster: Cluster) -> None:
    [rollout] = await stack.enqueue("t")
    async with stack.running(agent(cluster, WAITS)):
        await stack.until(lambda: api.of("pods"))
        await stack.queue.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, status="cancelled")])
        await stack.until(lambda: not api.objects)
    assert len(api.finalizing) == 1  # the runner waited for the pod


async def test_a_job_that_is_deleted_externally_fails_its_attempt(stack: Stack, api: Api, cluster: Cluster) -> None:
    [rollout] = await stack.enqueue("t")
    async with stack.running(agent(cluster, WAITS)):
        await stack.until(lambda: api.of("pods"))
        name = job_name(rollout.rollout_id, (await stack.queue.query_attempts([rollout.rollout_id]))[0].attempt_id)
        other = KubernetesApi(cluster)
        await other.delete("jobs", name)
        await other.close()
        [attempt] = await stack.finished(rollout)
    assert (attempt.status, attempt.error) == ("failed", f"the Job {name} was deleted before it ended")


async def test_a_busy_api_server_and_expired_watches_lose_nothing(stack: Stack, api: Api, cluster: Cluster) -> None:
    gate = "import sys, os, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)"
    open_gate = stack.directory / "open"
    [rollout] = await stack.enqueue("t")
    api.faults += [503, 429, 500]
    async with stack.running(agent(cluster, gate, str(open_gate))):
        await stack.until(lambda: api.of("pods"))
        watches = api.calls.count(("GET", "jobs"))
        await api.forget()
        await stack.until(lambda: api.calls.count(("GET", "jobs")) >= watches + 2)  # a list and a watch
        open_gate.touch()
        [attempt] = await stack.finished(rollout)
    assert attempt.status == "succeeded"


async def test_jobs_left_by_a_previous_process_of_the_runner_are_deleted(stack: Stack, api: Api, cluster: Cluster) -> None:
    made = agent(cluster, "pass")
    before = KubernetesApi(cluster)
    for owner in (made._owner, "another"):  # pyright: ignore[reportPrivateUsage]  # the label that it selects by
        await before.create(
            "jobs", job_body(f"old-{label(owner)}".lower(), "i", ["-c", WAITS], rollout_id="r", attempt_id="a", owner=owner)
        )
    await before.close()
    [rollout] = await stack.enqueue("t")
    await stack.run(made, max_rollouts=1)
    await stack.finished(rollout)
    assert [body["metadata"]["name"] for body in api.of("jobs")] == ["old-another"]


async def test_an_image_that_cannot_be_pulled_fails_the_attempt(
    stack: Stack, api: Api, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_otel.runner.agents.kubernetes.POD_POLL_SECONDS", 0.05)
    api.image_problem = "ImagePullBackOff"
    [rollout] = await stack.enqueue("t")
    await stack.run(agent(cluster, "pass"), max_rollouts=1)
    [attempt] = await stack.finished(rollout)
    assert attempt.error == "the Job's container does not start: ImagePullBackOff: no such image"


async def test_a_missing_cluster_and_missing_permissions_are_reported(stack: Stack, api: Api, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a Kubernetes pod"):
        Cluster.found(account=tmp_path)
    (tmp_path / "wrong").write_text("nobody")
    [rollout] = await stack.enqueue("t")
    await stack.run(agent(Cluster(api.url, NAMESPACE, tmp_path / "wrong"), "pass"), max_rollouts=1)
    [attempt] = await stack.finished(rollout)
    assert attempt.error == "Kubernetes refused GET jobs with 401: Unauthorized"


def test_a_missing_client_library_is_reported_with_its_extra(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(UsageError, match=r"pip install 'agl-otel\[kubernetes\]'"):
        agent(cluster, "pass")


def test_arguments_reach_the_container_unchanged() -> None:
    body = job_body("n", "i", ["$(OPENAI_API_KEY)", "a$b"], rollout_id="r", attempt_id="a", owner="w")
    assert body["spec"]["template"]["spec"]["containers"][0]["args"] == ["$$(OPENAI_API_KEY)", "a$$b"]


def test_long_values_and_certificates_become_files(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("CERTIFICATE")
    variables, files = as_secret({conventions.ENV_TASK: "x" * 200_000, "SSL_CERT_FILE": str(tmp_path / "ca.pem"), "A": "b"})
    assert variables["A"] == "b" and conventions.ENV_TASK not in variables
    assert files[variables[conventions.ENV_TASK_FILE].rpartition("/")[2]] == "x" * 200_000
    assert files[variables["SSL_CERT_FILE"].rpartition("/")[2]] == "CERTIFICATE"
    with pytest.raises(AgentError, match="a Kubernetes Secret takes"):
        as_secret({conventions.ENV_TASK: "x" * 2_000_000})


@pytest.mark.parametrize("attempt_id", ["at-01JX", "a", "..::__", "A:b.C_" * 21, "x" * 128])
def test_every_id_gives_a_valid_job_name(attempt_id: str) -> None:
    name = job_name("ro-1", attempt_id)
    assert len(name) <= 57 and name == name.lower() and name.replace("-", "").isalnum() and not name.endswith("-")
    assert name != job_name("ro-2", attempt_id)


def test_pod_fields_are_merged_into_the_jobs() -> None:
    pod = {"nodeSelector": {"a": "b"}, "containers": [{"resources": {"limits": {"memory": "1Gi"}}}], "securityContext": {"runAsUser": 1}}
    spec = job_body("n", "i", [], rollout_id="r", attempt_id="a", owner="w", pod=pod)["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == "i" and spec["containers"][0]["resources"] == {"limits": {"memory": "1Gi"}}
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "runAsUser": 1}
    assert merged([1], [2]) == [1, 2]


async def test_waiting_for_a_job_that_was_never_created_ends(api: Api, cluster: Cluster) -> None:
    made = agent(cluster, "pass")
    await made._opened()  # pyright: ignore[reportPrivateUsage]  # starts the watch
    async with asyncio.timeout(300):
        await made.close()

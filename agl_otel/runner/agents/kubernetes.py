"""An agent that is a Kubernetes Job: one for each attempt, made here, watched here and deleted here.

The Job is created asleep, then a Secret that it owns with all that identifies the attempt (its token, its task, its model), then it is
woken: so no value of it stands in a Job, which more people may read than Secrets, and the Secret goes with the Job. A Job belongs to the
pod of its runner, where that is known (AGL_POD_NAME and AGL_POD_UID): it goes with it. What an earlier life of this runner has left is
deleted at the start. One watch serves all attempts of a runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agl_otel.errors import AgentError, UsageError
from agl_otel.runner import placeholders
from agl_otel.runner.agents.command import is_instrumented
from agl_otel.runner.agents.kubernetes_api import Cluster, GoneError, KubernetesApi, Object, check_installed
from agl_otel.runner.environment import Addresses, process_environment
from agl_otel.runner.job import Grader, Job, grade
from agl_otel.runner.output import KEEP_BYTES, Capture
from agl_otel.runner.oversized import MAX_VARIABLE_BYTES
from agl_otel.types import LedgerReach
from agl_otel_hook import conventions

CONTAINER: Final = "agent"
FILES_AT: Final = "/var/run/agl-otel"
RUNNER_LABEL: Final = "agl-otel/runner"
SECRET_BYTES: Final = 1_000_000  # Kubernetes takes 1 MiB, names included
GRACE_SECONDS: Final = 5  # from SIGTERM to SIGKILL
GONE_SECONDS: Final = 15.0  # how long a deleted Job may take to be gone; running.py abandons the attempt after 20
LOOK_SECONDS: Final = 15.0  # between two looks at a pod that has not ended
AFTER_SECONDS: Final = 300  # a Job that nobody deletes goes so long after its end, and ends so long after its attempt's time
REWATCH_SECONDS: Final = 0.5
HOPELESS: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerError"})
"""Why a container waits that will not begin by itself."""
_FILE_VARIABLES: Final = (
    *("OTEL_EXPORTER_OTLP_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_KEY"),
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
)
_BY_FILE: Final = {conventions.ENV_TASK: conventions.ENV_TASK_FILE, conventions.ENV_RESOURCES: conventions.ENV_RESOURCES_FILE}
_log = logging.getLogger(__name__)


class KubernetesAgent:
    """Runs `image` as a Job for each attempt, with `command` as its arguments; what it prints is its answer.

    Kubernetes keeps stdout and stderr in one stream: with a grader an agent should print nothing but its answer.

    Args:
        image: the container's image.
        command: arguments; `{name}` is filled from the task.
        cluster: where the API server is; None: of the pod that this runs in.
        grader: (task, answer) → reward.
        env: what the container gets besides what identifies the attempt.
        pod: fields of the pod's spec, merged into ours: nodeSelector, tolerations, serviceAccountName, …; its containers[0] is merged
            into the agent's container: resources, volumeMounts, ….
        hooked: whether its processes run under our hook; None: where `command` begins with opentelemetry-instrument.

    Raises UsageError where there is no cluster, or the extra `agl-otel[kubernetes]` is not installed.
    """

    instrument: tuple[str, ...] = ()

    def __init__(
        self,
        image: str,
        command: Sequence[str] = (),
        *,
        cluster: Cluster | None = None,
        grader: Grader | None = None,
        env: Mapping[str, str] | None = None,
        pod: Mapping[str, Any] | None = None,
        hooked: bool | None = None,
    ) -> None:
        check_installed()
        self._image, self._command = image, list(command)
        self._cluster = cluster or Cluster.found()
        self._grader, self._env, self._pod = grader, dict(env or {}), dict(pod or {})
        self.hooked = is_instrumented(command) if hooked is None else hooked
        self._owner = os.environ.get("AGL_POD_NAME") or socket.gethostname()
        self._api: KubernetesApi | None = None
        self._watch: JobWatch | None = None
        self._opening = asyncio.Lock()

    @property
    def reach(self) -> LedgerReach:
        """They run on other machines."""
        return "elsewhere"

    @property
    def shown(self) -> str:
        """The image and its command, before anything is filled in."""
        return " ".join([self._image, *self._command])

    def prepare(self, addresses: Addresses) -> None:
        """Nothing: each Job gets an environment of its own."""

    def check(self, task: Any) -> None:
        """Raise UsageError where the task lacks what the command asks for."""
        placeholders.check(self._command, task)

    async def run(self, job: Job) -> None:
        """Run the Job to its end; grade its answer. Raises AgentError with why it failed."""
        api, watch = await self._opened()
        argv = placeholders.fill(self._command, job.rollout.input)
        env = process_environment(self._env, job.rollout, job.resources, job.addresses, traceparent=job.traceparent, token=job.token)
        said = Capture("stdout")
        job.captures.append(said)
        name = job_name(job.rollout_id, job.attempt_id)
        variables, files = as_secret(env)
        body = self._job(name, job, argv, files)
        ended = watch.expect(name)
        try:
            made = await api.create("jobs", body)
            watch.made(name)
            await api.create("secrets", secret_body(name, made, variables))
            if files:
                await api.create("secrets", secret_body(files_name(name), made, files))
            await api.patch("jobs", name, {"spec": {"suspend": False}})
            finished = await self._finished(api, name, ended)
            await self._read(api, name, said)
        finally:
            watch.forget(name)
            await asyncio.shield(self._end(api, watch, name))
        if problem := failure_of(finished):
            raise AgentError(f"{problem}{_quoted(said)}")
        if self._grader is not None:
            if said.cut_bytes:
                raise AgentError(f"the agent printed {said.total_bytes} bytes: more than {KEEP_BYTES} are no answer to be graded")
            await grade(job, self._grader, said.text().strip())

    async def close(self) -> None:
        """End the watch and the connections."""
        watch, api, self._watch, self._api = self._watch, self._api, None, None
        if watch is not None:
            await watch.close()
        if api is not None:
            await api.close()

    async def _opened(self) -> tuple[KubernetesApi, JobWatch]:
        async with self._opening:
            if self._api is None or self._watch is None:
                api, labels = KubernetesApi(self._cluster), f"{RUNNER_LABEL}={label(self._owner)}"
                try:
                    left, _ = await api.list("jobs", labels)
                    for old in left:
                        _log.warning("the Job %s is of an earlier life of this runner; it is deleted", old["metadata"]["name"])
                        await api.delete("jobs", old["metadata"]["name"])
                except BaseException:
                    await api.close()
                    raise
                self._api, self._watch = api, JobWatch(api, labels)
            return self._api, self._watch

    def _job(self, name: str, job: Job, argv: Sequence[str], files: Mapping[str, str]) -> Object:
        limit = job.rollout.config.timeout_seconds
        return job_body(
            name, self._image, argv, rollout_id=job.rollout_id, attempt_id=job.attempt_id, owner=self._owner,
            owner_uid=os.environ.get("AGL_POD_UID", ""), files=files, pod=self._pod,
            deadline_seconds=None if limit is None else int(limit) + AFTER_SECONDS,
        )  # fmt: skip

    async def _finished(self, api: KubernetesApi, name: str, ended: asyncio.Future[Object]) -> Object:
        """The Job once it has ended. Raises AgentError where its pod will never begin."""
        while True:
            done, _ = await asyncio.wait({ended}, timeout=LOOK_SECONDS)
            if done:
                return ended.result()
            for pod in await self._pods(api, name):
                if why := stuck(pod):
                    raise AgentError(f"the Job's container does not begin: {why}")

    async def _read(self, api: KubernetesApi, name: str, said: Capture) -> None:
        for pod in await self._pods(api, name):
            with contextlib.suppress(GoneError):
                async for data in api.log(pod["metadata"]["name"], CONTAINER):
                    said.feed(data)
            if why := termination(pod):
                raise AgentError(f"{why}{_quoted(said)}")

    async def _pods(self, api: KubernetesApi, name: str) -> list[Object]:
        pods, _ = await api.list("pods", f"job-name={name}")
        return pods

    async def _end(self, api: KubernetesApi, watch: JobWatch, name: str) -> None:
        """Delete the Job, and wait until its pod is gone."""
        gone = watch.expect_gone(name)
        try:
            await api.delete("jobs", name, wait=True)
            async with asyncio.timeout(GONE_SECONDS):
                await gone
        except TimeoutError:
            _log.warning("the Job %s is deleted, and its pod is not gone after %.0f s", name, GONE_SECONDS)
        except AgentError as error:
            _log.error("the Job %s could not be deleted: %s", name, error)
        finally:
            watch.forget(name)


class JobWatch:
    """Tells of the Jobs with some labels when they have ended, and when they are gone."""

    def __init__(self, api: KubernetesApi, labels: str) -> None:
        self._api, self._labels = api, labels
        self._ended: dict[str, asyncio.Future[Object]] = {}
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._seen: set[str] = set()
        self._task = asyncio.create_task(self._run(), name="kubernetes-watch")

    def expect(self, name: str) -> asyncio.Future[Object]:
        """Resolves with the Job when it has ended; fails with GoneError when somebody deletes it."""
        return self._ended.setdefault(name, asyncio.get_running_loop().create_future())

    def made(self, name: str) -> None:
        """It is there now: it is gone only when the watch says so."""
        self._seen.add(name)

    def expect_gone(self, name: str) -> asyncio.Future[None]:
        """Resolves when the Job is gone, at once where it never came."""
        gone = self._gone.setdefault(name, asyncio.get_running_loop().create_future())
        if name not in self._seen and not gone.done():
            gone.set_result(None)
        return gone

    def forget(self, name: str) -> None:
        """Nobody waits for it any more."""
        for waiting in (self._ended.pop(name, None), self._gone.pop(name, None)):
            if waiting is not None:
                waiting.cancel()

    async def close(self) -> None:
        """End the watch."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                known = set(self._seen)  # before we ask: what comes meanwhile may not be in the answer
                jobs, version = await self._api.list("jobs", self._labels)
                for job in jobs:
                    self._changed(job)
                for name in known - {job["metadata"]["name"] for job in jobs}:
                    self._deleted(name)
                async for kind, job in self._api.watch("jobs", self._labels, version):
                    if kind == "DELETED":
                        self._deleted(job["metadata"]["name"])
                    elif kind in ("ADDED", "MODIFIED"):
                        self._changed(job)
            except GoneError:
                continue  # its place in history is too old: look at all, and watch from there
            except AgentError as error:
                _log.warning("%s; the watch begins again", error)
                await asyncio.sleep(REWATCH_SECONDS)

    def _changed(self, job: Object) -> None:
        name = job["metadata"]["name"]
        self._seen.add(name)
        waiting = self._ended.get(name)
        if waiting is not None and not waiting.done() and condition_of(job) is not None:
            waiting.set_result(job)

    def _deleted(self, name: str) -> None:
        self._seen.discard(name)
        ended, gone = self._ended.get(name), self._gone.get(name)
        if ended is not None and not ended.done():
            ended.set_exception(GoneError(f"somebody deleted the Job {name}"))
        if gone is not None and not gone.done():
            gone.set_result(None)


def job_name(rollout_id: str, attempt_id: str) -> str:
    """The Job's name: an attempt's own, and one that Kubernetes takes whatever the ids are."""
    digest = hashlib.sha256(f"{rollout_id}/{attempt_id}".encode()).hexdigest()[:12]
    readable = re.sub(r"[^a-z0-9]+", "-", attempt_id.lower()).strip("-")[:36]
    return f"agl-{readable}-{digest}" if readable else f"agl-{digest}"


def label(text: str) -> str:
    """`text` as a value of a label."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[-63:].strip("-") or "none"


def as_secret(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """({variable: value}, {name of a file: content}) of a process's environment. Raises AgentError where it is too large for a Secret.

    Files that variables name here, and values too long for a variable, become files there.
    """
    variables, files = dict(env), dict[str, str]()
    for name in _FILE_VARIABLES:
        if path := variables.get(name):
            file = hashlib.sha256(path.encode()).hexdigest()[:8] + ".pem"
            files[file] = Path(path).read_text()
            variables[name] = f"{FILES_AT}/{file}"
    for name, by_file in _BY_FILE.items():
        if len(variables.get(name, "").encode()) > MAX_VARIABLE_BYTES:
            files[f"{name}.json"] = variables.pop(name)
            variables[by_file] = f"{FILES_AT}/{name}.json"
    size = sum(len(name) + len(value.encode()) for name, value in (*variables.items(), *files.items()))
    if size > SECRET_BYTES:
        raise AgentError(f"the attempt's task and resources are {size} bytes: a Kubernetes Secret takes {SECRET_BYTES}")
    return variables, files


def files_name(name: str) -> str:
    """The Secret with a Job's files: another than that with its variables, all of whose keys become variables."""
    return f"{name}-files"


def secret_body(name: str, job: Object, data: Mapping[str, str]) -> Object:
    """A Secret that goes with the Job."""
    about = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": about["name"], "uid": about["uid"], "blockOwnerDeletion": True}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "ownerReferences": [owner], "labels": dict(about.get("labels") or {})},
        "immutable": True,
        "type": "Opaque",
        "stringData": dict(data),
    }


def job_body(
    name: str,
    image: str,
    argv: Sequence[str],
    *,
    rollout_id: str,
    attempt_id: str,
    owner: str,
    owner_uid: str = "",
    files: Mapping[str, str] | None = None,
    pod: Mapping[str, Any] | None = None,
    deadline_seconds: int | None = None,
) -> Object:
    """The Job of one attempt, asleep. `argv` reaches the container as it is: Kubernetes' own $(VARIABLE) is not filled in."""
    labels = {"app.kubernetes.io/managed-by": "agl-otel", RUNNER_LABEL: label(owner)}
    ids = {"agl-otel/rollout": rollout_id, "agl-otel/attempt": attempt_id}
    container: Object = {
        "name": CONTAINER,
        "image": image,
        "envFrom": [{"secretRef": {"name": name}}],
        "securityContext": {"allowPrivilegeEscalation": False},
        **({"args": [argument.replace("$", "$$") for argument in argv]} if argv else {}),
    }
    spec: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    if files:
        items = [{"key": file, "path": file} for file in sorted(files)]
        spec["volumes"] = [{"name": "agl-otel", "secret": {"secretName": files_name(name), "items": items}}]
        container["volumeMounts"] = [{"name": "agl-otel", "mountPath": FILES_AT, "readOnly": True}]
    body: Object = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels, "annotations": ids},
        "spec": {
            "suspend": True,
            "backoffLimit": 0,  # retries are the queue's
            "ttlSecondsAfterFinished": AFTER_SECONDS,
            **({"activeDeadlineSeconds": deadline_seconds} if deadline_seconds else {}),
            "template": {"metadata": {"labels": labels, "annotations": ids}, "spec": merged(spec, pod or {})},
        },
    }
    if owner_uid:
        reference = {"apiVersion": "v1", "kind": "Pod", "name": owner, "uid": owner_uid}
        body["metadata"]["ownerReferences"] = [reference]
    return body


def merged(ours: Any, theirs: Any) -> Any:
    """`ours` with `theirs` in it: mappings by key, of lists of mappings the first into the first, other lists one after the other."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        both: Object = {**ours}
        for key, value in theirs.items():
            both[key] = merged(ours[key], value) if key in ours else value
        return both
    if isinstance(ours, list) and isinstance(theirs, list) and ours and theirs:
        first, others = ours[0], theirs[0]
        if isinstance(first, Mapping) and isinstance(others, Mapping) and others.get("name", first.get("name")) == first.get("name"):
            return [merged(first, others), *ours[1:], *theirs[1:]]
        return [*ours, *theirs]
    return theirs


def condition_of(job: Object) -> Object | None:
    """The condition that says that a Job has ended."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] in ("Complete", "Failed") and c["status"] == "True"), None)


def failure_of(job: Object) -> str:
    """Why an ended Job failed; empty where it did not."""
    condition = condition_of(job)
    if condition is None or condition["type"] == "Complete":
        return ""
    return f"the Job failed: {condition.get('reason', '')} {condition.get('message', '')}".rstrip()


def termination(pod: Object) -> str:
    """How a pod's container ended, in words; empty where it ended well or is not known to have ended."""
    ended = _state(pod).get("terminated")
    if not ended or not ended.get("exitCode"):
        return ""
    reason = ended.get("reason") or ""
    return f"the agent's container ended with exit code {ended['exitCode']}{f' ({reason})' if reason not in ('', 'Error') else ''}"


def stuck(pod: Object) -> str:
    """Why a pod's container will not begin; empty where it may."""
    waiting = _state(pod).get("waiting") or {}
    return f"{waiting['reason']}: {waiting.get('message', '')}" if waiting.get("reason") in HOPELESS else ""


def check_pod(pod: object) -> Mapping[str, Any]:
    """`pod` as the fields of a pod's spec. Raises UsageError."""
    if not isinstance(pod, Mapping):
        raise UsageError('the fields of a pod are a JSON object: {"nodeSelector": {"gpu": "none"}}')
    return pod


def _state(pod: Object) -> Object:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return next((status.get("state") or {} for status in statuses if status["name"] == CONTAINER), {})


def _quoted(said: Capture) -> str:
    return f": {lines}" if (lines := said.last_lines()) else " and printed nothing"

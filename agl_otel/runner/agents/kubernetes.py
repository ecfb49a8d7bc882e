"""Kubernetes agents: one Job for each attempt, created, watched and deleted by the runner.

The Job is created suspended, then a Secret that it owns with the attempt's variables (keys, task, model), then the Job is resumed. So
the Job, which more people may read than Secrets, holds none of these values, and the Secret is deleted with it. The Job is owned by the
runner's pod where that is known (AGL_POD_NAME and AGL_POD_UID), and deleted with it. Jobs that a previous process of this runner left
are deleted at the start. One watch serves all attempts of a runner.
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
FILES_FOLDER: Final = "/var/run/agl-otel"
RUNNER_LABEL: Final = "agl-otel/runner"
SECRET_BYTES: Final = 1_000_000  # Kubernetes' limit is 1 MiB, names included
GRACE_SECONDS: Final = 5  # from SIGTERM to SIGKILL
GONE_SECONDS: Final = 15.0  # wait for a deleted Job to disappear; running.py abandons the attempt after 20 s
POD_POLL_SECONDS: Final = 15.0  # between checks of a pod that has not ended
TTL_SECONDS: Final = 300  # Kubernetes ends an orphaned Job this long after the attempt's time limit, and deletes it this long after its end
REWATCH_SECONDS: Final = 0.5  # pause before a failed watch is restarted
FATAL_WAITING_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerError"}
)
"""Reasons of a waiting container that will never start."""
_FILE_VARIABLES: Final = (
    *("OTEL_EXPORTER_OTLP_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_KEY"),
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
)
_BY_FILE: Final = {conventions.ENV_TASK: conventions.ENV_TASK_FILE, conventions.ENV_RESOURCES: conventions.ENV_RESOURCES_FILE}
_log = logging.getLogger(__name__)


class KubernetesAgent:
    """Runs `image` as a Job for each attempt, with `command` as its arguments; its output is the answer.

    Kubernetes merges stdout and stderr into one stream: with a grader, an agent should print nothing but its answer.

    Args:
        image: the container image.
        command: arguments; `{name}` is filled from the task.
        cluster: the cluster to use; None: that of the runner's pod.
        grader: (task, answer) → reward.
        env: variables added to those of the attempt.
        pod: fields merged into the pod's spec: nodeSelector, tolerations, serviceAccountName, …; containers[0] is merged into the
            agent's container: resources, volumeMounts, ….
        hooked: whether its processes run under the hook; None: if `command` begins with opentelemetry-instrument.

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
        """Always "elsewhere": the processes run on other machines."""
        return "elsewhere"

    @property
    def description(self) -> str:
        """The image and the command, with its placeholders."""
        return " ".join([self._image, *self._command])

    def prepare(self, addresses: Addresses) -> None:
        """Do nothing: each Job gets its own environment."""

    def check(self, task: Any) -> None:
        """Raise UsageError where the task cannot fill the command's placeholders."""
        placeholders.check(self._command, task)

    async def run(self, job: Job) -> None:
        """Run the Job to its end and grade its answer. Raises AgentError with the reason where it failed."""
        api, watch = await self._opened()
        argv = placeholders.fill(self._command, job.rollout.input)
        env = process_environment(self._env, job.rollout, job.resources, job.addresses, traceparent=job.traceparent, token=job.token)
        output = Capture("stdout")
        job.captures.append(output)
        name = job_name(job.rollout_id, job.attempt_id)
        variables, files = as_secret(env)
        body = self._job(name, job, argv, files)
        ended = watch.expect(name)
        try:
            created = await api.create("jobs", body)
            watch.created(name)
            await api.create("secrets", secret_body(name, created, variables))
            if files:
                await api.create("secrets", secret_body(files_name(name), created, files))
            await api.patch("jobs", name, {"spec": {"suspend": False}})
            finished = await self._finished(api, name, ended)
            await self._read_log(api, name, output)
        finally:
            watch.forget(name)
            await asyncio.shield(self._end(api, watch, name))
        if problem := failure_of(finished):
            raise AgentError(f"{problem}{_quoted(output)}")
        if self._grader is not None:
            if output.cut_bytes:
                raise AgentError(f"the agent printed {output.total_bytes} bytes: answers over {KEEP_BYTES} bytes are not graded")
            await grade(job, self._grader, output.text().strip())

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
                        _log.warning("deleting the Job %s, which a previous process of this runner left", old["metadata"]["name"])
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
            deadline_seconds=None if limit is None else int(limit) + TTL_SECONDS,
        )  # fmt: skip

    async def _finished(self, api: KubernetesApi, name: str, ended: asyncio.Future[Object]) -> Object:
        """Wait for the end of the Job and return it. Raises AgentError where its container will never start."""
        while True:
            done, _ = await asyncio.wait({ended}, timeout=POD_POLL_SECONDS)
            if done:
                return ended.result()
            for pod in await self._pods(api, name):
                if reason := stuck(pod):
                    raise AgentError(f"the Job's container does not start: {reason}")

    async def _read_log(self, api: KubernetesApi, name: str, output: Capture) -> None:
        for pod in await self._pods(api, name):
            with contextlib.suppress(GoneError):
                async for data in api.log(pod["metadata"]["name"], CONTAINER):
                    output.feed(data)
            if problem := termination(pod):
                raise AgentError(f"{problem}{_quoted(output)}")

    async def _pods(self, api: KubernetesApi, name: str) -> list[Object]:
        pods, _ = await api.list("pods", f"job-name={name}")
        return pods

    async def _end(self, api: KubernetesApi, watch: JobWatch, name: str) -> None:
        """Delete the Job and wait until its pod is gone."""
        gone = watch.expect_gone(name)
        try:
            await api.delete("jobs", name, wait=True)
            async with asyncio.timeout(GONE_SECONDS):
                await gone
        except TimeoutError:
            _log.warning("the pod of the deleted Job %s still exists after %.0f s", name, GONE_SECONDS)
        except AgentError as error:
            _log.error("the Job %s could not be deleted: %s", name, error)
        finally:
            watch.forget(name)


class JobWatch:
    """Watches the Jobs with the given labels for their end and their deletion."""

    def __init__(self, api: KubernetesApi, labels: str) -> None:
        self._api, self._labels = api, labels
        self._ended: dict[str, asyncio.Future[Object]] = {}
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._seen: set[str] = set()
        self._task = asyncio.create_task(self._run(), name="kubernetes-watch")

    def expect(self, name: str) -> asyncio.Future[Object]:
        """Return a future of the ended Job; it raises GoneError if the Job is deleted before."""
        return self._ended.setdefault(name, asyncio.get_running_loop().create_future())

    def created(self, name: str) -> None:
        """Record that the Job exists, so that `expect_gone` waits for its deletion."""
        self._seen.add(name)

    def expect_gone(self, name: str) -> asyncio.Future[None]:
        """Return a future that is done when the Job is gone; immediately if it was never created."""
        gone = self._gone.setdefault(name, asyncio.get_running_loop().create_future())
        if name not in self._seen and not gone.done():
            gone.set_result(None)
        return gone

    def forget(self, name: str) -> None:
        """Cancel the futures of a Job."""
        for waiting in (self._ended.pop(name, None), self._gone.pop(name, None)):
            if waiting is not None:
                waiting.cancel()

    async def close(self) -> None:
        """Stop watching."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                known = set(self._seen)  # taken before listing: Jobs created meanwhile may be missing from the list
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
                continue  # the resource version has expired: list again, and watch from there
            except AgentError as error:
                _log.warning("%s; restarting the watch", error)
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
            ended.set_exception(GoneError(f"the Job {name} was deleted before it ended"))
        if gone is not None and not gone.done():
            gone.set_result(None)


def job_name(rollout_id: str, attempt_id: str) -> str:
    """Return the name of an attempt's Job: unique, and valid in Kubernetes for any ids."""
    digest = hashlib.sha256(f"{rollout_id}/{attempt_id}".encode()).hexdigest()[:12]
    readable = re.sub(r"[^a-z0-9]+", "-", attempt_id.lower()).strip("-")[:36]
    return f"agl-{readable}-{digest}" if readable else f"agl-{digest}"


def label(text: str) -> str:
    """Turn `text` into a valid label value."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[-63:].strip("-") or "none"


def as_secret(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split an environment into ({variable: value}, {file name: content}) for a Job's Secrets.

    Certificate files that variables name, and values too long for a variable, become files in the container. Raises AgentError where
    the environment is too large for a Secret.
    """
    variables, files = dict(env), dict[str, str]()
    for name in _FILE_VARIABLES:
        if path := variables.get(name):
            file = hashlib.sha256(path.encode()).hexdigest()[:8] + ".pem"
            files[file] = Path(path).read_text()
            variables[name] = f"{FILES_FOLDER}/{file}"
    for name, by_file in _BY_FILE.items():
        if len(variables.get(name, "").encode()) > MAX_VARIABLE_BYTES:
            files[f"{name}.json"] = variables.pop(name)
            variables[by_file] = f"{FILES_FOLDER}/{name}.json"
    size = sum(len(name) + len(value.encode()) for name, value in (*variables.items(), *files.items()))
    if size > SECRET_BYTES:
        raise AgentError(f"the attempt's task and resources are {size} bytes: a Kubernetes Secret takes {SECRET_BYTES}")
    return variables, files


def files_name(name: str) -> str:
    """Return the name of the Secret with a Job's files. The other Secret's keys all become variables, so files need their own."""
    return f"{name}-files"


def secret_body(name: str, job: Object, data: Mapping[str, str]) -> Object:
    """Build a Secret that is owned by the Job and deleted with it."""
    metadata = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"], "blockOwnerDeletion": True}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "ownerReferences": [owner], "labels": dict(metadata.get("labels") or {})},
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
    """Build the suspended Job of one attempt. `argv` reaches the container unchanged: `$` is escaped from Kubernetes' $(VARIABLE)."""
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
        container["volumeMounts"] = [{"name": "agl-otel", "mountPath": FILES_FOLDER, "readOnly": True}]
    body: Object = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels, "annotations": ids},
        "spec": {
            "suspend": True,
            "backoffLimit": 0,  # the queue retries
            "ttlSecondsAfterFinished": TTL_SECONDS,
            **({"activeDeadlineSeconds": deadline_seconds} if deadline_seconds else {}),
            "template": {"metadata": {"labels": labels, "annotations": ids}, "spec": merged(spec, pod or {})},
        },
    }
    if owner_uid:
        reference = {"apiVersion": "v1", "kind": "Pod", "name": owner, "uid": owner_uid}
        body["metadata"]["ownerReferences"] = [reference]
    return body


def merged(ours: Any, theirs: Any) -> Any:
    """Merge `theirs` into `ours`: mappings by key; of lists of mappings, the first elements; other lists are concatenated."""
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
    """Return the condition of an ended Job (Complete or Failed); None while it runs."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] in ("Complete", "Failed") and c["status"] == "True"), None)


def failure_of(job: Object) -> str:
    """Return why an ended Job failed; empty where it succeeded."""
    condition = condition_of(job)
    if condition is None or condition["type"] == "Complete":
        return ""
    return f"the Job failed: {condition.get('reason', '')} {condition.get('message', '')}".rstrip()


def termination(pod: Object) -> str:
    """Describe how a pod's container failed; empty where it succeeded or has not ended."""
    ended = _state(pod).get("terminated")
    if not ended or not ended.get("exitCode"):
        return ""
    reason = ended.get("reason") or ""
    return f"the agent's container ended with exit code {ended['exitCode']}{f' ({reason})' if reason not in ('', 'Error') else ''}"


def stuck(pod: Object) -> str:
    """Return why a pod's container will never start; empty where it may."""
    waiting = _state(pod).get("waiting") or {}
    return f"{waiting['reason']}: {waiting.get('message', '')}" if waiting.get("reason") in FATAL_WAITING_REASONS else ""


def check_pod(pod: object) -> Mapping[str, Any]:
    """Return `pod` if it is a mapping of pod spec fields. Raises UsageError otherwise."""
    if not isinstance(pod, Mapping):
        raise UsageError('the fields of a pod must be a JSON object, for example {"nodeSelector": {"gpu": "none"}}')
    return pod


def _state(pod: Object) -> Object:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return next((status.get("state") or {} for status in statuses if status["name"] == CONTAINER), {})


def _quoted(output: Capture) -> str:
    return f": {lines}" if (lines := output.error_lines()) else " and printed nothing"

"""A stand-in for Kubernetes' API server and its Job controller: a real HTTP server with real watches, whose "containers" are processes.

No cluster can run in a test: kube-apiserver needs etcd, and a Job needs nodes. What is here does as the API's reference says for the few
calls that a runner makes: names are taken once, a suspended Job starts nothing, envFrom takes all of a Secret, $$ becomes $, a deleted
owner takes what it owns with it, a watch begins at a version and forgets old ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sys
from typing import Any, Final
from urllib.parse import parse_qsl

from aiohttp import web
from aiohttp.test_utils import TestServer

Object = dict[str, Any]
TOKEN: Final = "service-account-token"
NAMESPACE: Final = "agents"


class Api:
    """All objects of one namespace. `faults` answers that come before the real ones; `forget` makes the watches' places too old."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.calls: list[tuple[str, str]] = []
        self.created: list[Object] = []
        self.faults: list[int] = []
        self.image_problem = ""
        self.finalizing: set[str] = set()
        self._events: list[tuple[int, str, str, Object]] = []
        self._oldest = 0
        self._changed = asyncio.Condition()
        self._numbers = itertools.count(1)
        self._pods: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[str, bytes] = {}
        app = web.Application()
        place = f"/{{group:api/v1|apis/batch/v1}}/namespaces/{NAMESPACE}/{{kind}}"
        app.router.add_route("*", place, self._handle)
        app.router.add_route("*", place + "/{name}", self._handle)
        app.router.add_get(place + "/{name}/log", self._log)
        self.server = TestServer(app)

    async def close(self) -> None:
        """End what runs."""
        for task in self._pods.values():
            task.cancel()
        await asyncio.gather(*self._pods.values(), return_exceptions=True)
        await self.server.close()

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    def of(self, kind: str) -> list[Object]:
        return [body for (its_kind, _), body in self.objects.items() if its_kind == kind]

    async def forget(self) -> None:
        """As after a long time: every watch is told that its place is gone."""
        async with self._changed:
            self._oldest = next(self._numbers)
            self._changed.notify_all()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        kind, name = request.match_info["kind"], request.match_info.get("name", "")
        self.calls.append((request.method, kind))
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        if self.faults:
            return _status(self.faults.pop(0), "told to fail")
        match request.method, bool(name):
            case "POST", False:
                return await self._create(kind, await request.json())
            case "GET", False:
                return await (self._watch(request, kind) if request.query.get("watch") else self._list(request, kind))
            case _ if (kind, name) not in self.objects:
                return _status(404, f'{kind} "{name}" not found')
            case "GET", True:
                return web.json_response(self.objects[kind, name])
            case "PATCH", True:
                assert request.content_type == "application/merge-patch+json"
                await self._store(kind, _patched(self.objects[kind, name], await request.json()), "MODIFIED")
                await self._reconcile(name)
                return web.json_response(self.objects[kind, name])
            case "DELETE", True:
                await self._delete(kind, name, foreground=(await request.json())["propagationPolicy"] == "Foreground")
                return web.json_response({"kind": "Status", "status": "Success"})
            case _:
                return _status(405, "no such call")

    async def _create(self, kind: str, body: Object) -> web.Response:
        name = body["metadata"]["name"]
        if (kind, name) in self.objects:
            return _status(409, f'{kind} "{name}" already exists')
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name), name
        for value in (body["metadata"].get("labels") or {}).values():
            assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value), value
        body["metadata"]["uid"] = f"uid-{name}"
        self.created.append(json.loads(json.dumps(body)))
        await self._store(kind, body, "ADDED")
        await self._reconcile(name)
        return web.json_response(body, status=201)

    async def _list(self, request: web.Request, kind: str) -> web.Response:
        items = [body for body in self.of(kind) if _selected(request, body)]
        return web.json_response({"items": items, "metadata": {"resourceVersion": str(next(self._numbers))}})

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        seen = int(request.query["resourceVersion"])
        while True:
            if seen < self._oldest:
                await answer.write(_line("ERROR", {"code": 410, "reason": "Expired", "message": "too old resource version"}))
                return answer
            for version, its_kind, event, body in list(self._events):
                if version > seen and its_kind == kind and _selected(request, body):
                    await answer.write(_line(event, body))
            seen = max([seen, *(version for version, *_ in self._events)])
            async with self._changed:
                await self._changed.wait_for(lambda: self._oldest > seen or any(version > seen for version, *_ in self._events))  # noqa: B023 - awaited here

    async def _log(self, request: web.Request) -> web.Response:
        return web.Response(body=self._logs.get(request.match_info["name"], b"")[: int(request.query["limitBytes"])])

    async def _store(self, kind: str, body: Object, event: str) -> None:
        async with self._changed:
            version = next(self._numbers)
            body["metadata"]["resourceVersion"] = str(version)
            if event == "DELETED":
                self.objects.pop((kind, body["metadata"]["name"]), None)
            else:
                self.objects[kind, body["metadata"]["name"]] = body
            self._events.append((version, kind, event, json.loads(json.dumps(body))))
            self._changed.notify_all()

    async def _delete(self, kind: str, name: str, *, foreground: bool) -> None:
        task = self._pods.pop(name, None) if kind == "jobs" else None
        body = self.objects.get((kind, name))
        if body is None:
            return
        if task is not None:
            task.cancel()
            if foreground:
                self.finalizing.add(name)
                await self._store(kind, {**body, "metadata": {**body["metadata"], "deletionTimestamp": "now"}}, "MODIFIED")
            await asyncio.gather(task, return_exceptions=True)
        await self._store(kind, body, "DELETED")
        for (its_kind, its_name), owned in list(self.objects.items()):
            if any(owner["uid"] == body["metadata"]["uid"] for owner in owned["metadata"].get("ownerReferences") or []):
                await self._delete(its_kind, its_name, foreground=False)

    async def _reconcile(self, name: str) -> None:
        """The Job controller: a Job that is awake gets its pod."""
        job = self.objects.get(("jobs", name))
        if job is None or job["spec"].get("suspend") or name in self._pods:
            return
        pod: Object = {
            "metadata": {
                "name": f"{name}-x1",
                "labels": {"job-name": name},
                "uid": f"uid-pod-{name}",
                "ownerReferences": [{"uid": job["metadata"]["uid"]}],
            },
            "spec": job["spec"]["template"]["spec"],
        }
        await self._store("pods", pod, "ADDED")
        self._pods[name] = asyncio.create_task(self._run(job, pod))

    async def _run(self, job: Object, pod: Object) -> None:
        """The kubelet: the container is a Python process with nothing but the Secret's variables."""
        container, name = pod["spec"]["containers"][0], pod["metadata"]["name"]
        if self.image_problem:
            state = {"waiting": {"reason": self.image_problem, "message": "no such image"}}
            await self._store("pods", {**pod, "status": {"containerStatuses": [{"name": "agent", "state": state}]}}, "MODIFIED")
            return
        env: dict[str, str] = {}
        for source in container["envFrom"]:
            env |= self.objects["secrets", source["secretRef"]["name"]]["stringData"]
        arguments = [argument.replace("$$", "$") for argument in container["args"]]
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=env, stdin=nothing, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )  # fmt: skip
        try:
            printed, _ = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        self._logs[name] = printed
        ended = {"exitCode": process.returncode, "reason": "Completed" if process.returncode == 0 else "Error"}
        await self._store("pods", {**pod, "status": {"containerStatuses": [{"name": "agent", "state": {"terminated": ended}}]}}, "MODIFIED")
        condition = {"type": "Complete" if process.returncode == 0 else "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
        await self._store("jobs", {**self.objects["jobs", job["metadata"]["name"]], "status": {"conditions": [condition]}}, "MODIFIED")


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code)


def _line(event: str, body: Object) -> bytes:
    return json.dumps({"type": event, "object": body}).encode() + b"\n"


def _selected(request: web.Request, body: Object) -> bool:
    wanted = dict(parse_qsl(request.query.get("labelSelector", "")))
    return wanted.items() <= (body["metadata"].get("labels") or {}).items()


def _patched(body: Object, change: Object) -> Object:
    return {**body, **{key: _patched(body[key], value) if isinstance(value, dict) else value for key, value in change.items()}}

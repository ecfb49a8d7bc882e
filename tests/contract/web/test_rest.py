"""REST of Agent Lightning 0.3, route by route, against a running `agl-otel store`: response shapes, statuses and error messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from agl_otel.store import LightningStoreClient
from agl_otel.web.rest import ROUTES
from tests.contract.web.conftest import ORIGIN, Web

PROMPT = {"resource_type": "prompt_template", "template": "{q}", "engine": "f-string"}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OK = {"status_code": "OK", "description": None}


@dataclass
class World:
    """A test's own rollout, started by a worker, and a set of resources."""

    web: Web

    def __post_init__(self) -> None:
        begun = self.web.rest("POST", "/rollouts", {"input": {"q": 1}, "worker_id": "w-begun"}).json
        self.rollout_id: str = begun["rollout_id"]
        self.attempt_id: str = begun["attempt"]["attempt_id"]
        self.resources_id: str = self.web.rest("POST", "/resources", {"resources": {"p": PROMPT}}).json["resources_id"]
        self.worker_id = "w-begun"

    def path(self, template: str) -> str:
        return template.format(**vars(self))

    def span(self, name: str = "made") -> dict[str, Any]:
        ids = {"rollout_id": self.rollout_id, "attempt_id": self.attempt_id, "sequence_id": 1, "trace_id": TRACE, "span_id": SPAN}
        values = {"attributes": {"n": 3, "x": 0.5, "ids": [1, 2]}, "events": [], "links": [], "parent_id": None}
        times = {"start_time": 1_790_000_000.25, "end_time": 1_790_000_001.5, "context": None, "parent": None}
        return {**ids, **values, **times, "name": name, "status": OK, "resource": {"attributes": {"service.name": "s"}, "schema_url": ""}}

    def stored(self) -> None:
        assert self.web.rest("POST", "/spans", self.span()).status == 201

    def queued(self) -> str:
        return self.web.rest("POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": 1}]}).json[0]["rollout_id"]


def emptied(w: World) -> None:
    while w.web.rest("POST", "/queues/rollouts/dequeue", {"limit": 100}).json:
        pass


def dequeued(w: World) -> dict[str, Any]:
    emptied(w)
    w.rollout_id = w.queued()
    return {"limit": 2, "worker_id": "w-dequeue"}


def finished(w: World) -> dict[str, Any]:
    w.web.rest("POST", w.path("/rollouts/{rollout_id}/attempts/latest"), {"status": "succeeded"})
    return {"rollout_ids": [w.rollout_id], "timeout": 0.05}


def stored(w: World) -> dict[str, Any]:
    w.stored()
    return {"rollout_id": w.rollout_id, "name_contains": "ad"}


def only(items: list[Any]) -> Any:
    [item] = items
    return item


def page_of(answer: dict[str, Any]) -> Any:
    assert set(answer) == {"items", "limit", "offset", "total"} and answer["total"] == 1
    return only(answer["items"])


Given = Callable[[World], Any]
Check = Callable[[World, Any], bool]
CASES: dict[tuple[str, str], tuple[Given, Check]] = {
    ("GET", "/health"): (lambda w: None, lambda w, a: a == {"status": "ok"}),
    ("GET", "/statistics"): (
        lambda w: w.stored(),
        lambda w, a: all(a[f"total_{what}"] >= 1 for what in ("rollouts", "attempts", "spans", "resources", "workers")),
    ),
    ("POST", "/queues/rollouts/enqueue"): (
        lambda w: {
            "rollouts": [{"input": {"q": 2}, "mode": "train", "metadata": {"k": [1]}, "config": {"max_attempts": 2}}, {"input": "b"}]
        },
        lambda w, a: (
            [(r["input"], r["mode"], r["status"], r["config"]["max_attempts"]) for r in a]
            == [({"q": 2}, "train", "queuing", 2), ("b", None, "queuing", 1)]
        ),
    ),
    ("POST", "/queues/rollouts/dequeue"): (
        dequeued,
        lambda w, a: (only(a)["rollout_id"], only(a)["attempt"]["worker_id"], "token" in only(a)) == (w.rollout_id, "w-dequeue", False),
    ),
    ("POST", "/rollouts"): (
        lambda w: {"input": "c", "mode": "val", "worker_id": "w-start", "resources_id": w.resources_id},
        lambda w, a: (
            (a["status"], a["mode"], a["resources_id"], a["attempt"]["sequence_id"], a["attempt"]["worker_id"])
            == ("preparing", "val", w.resources_id, 1, "w-start")
        ),
    ),
    ("GET", "/rollouts"): (
        lambda w: {"rollout_id_in": [w.rollout_id, "ro-none"], "status_in": ["preparing", "running"], "sort_by": "start_time", "limit": 5},
        lambda w, a: page_of(a)["attempt"]["attempt_id"] == w.attempt_id,
    ),
    ("POST", "/rollouts/search"): (
        lambda w: {"rollout_id_contains": w.rollout_id[3:], "sort_order": "desc"},
        lambda w, a: page_of(a)["rollout_id"] == w.rollout_id,
    ),
    ("GET", "/rollouts/{rollout_id}"): (lambda w: None, lambda w, a: a["input"] == {"q": 1} and a["attempt"]["attempt_id"] == w.attempt_id),
    ("POST", "/rollouts/{rollout_id}"): (
        lambda w: {"metadata": {"seen": True}, "mode": None, "status": "cancelled"},
        lambda w, a: (a["metadata"], a["mode"], a["status"], a["input"]) == ({"seen": True}, None, "cancelled", {"q": 1}),
    ),
    ("GET", "/rollouts/{rollout_id}/attempts"): (lambda w: {"limit": 1}, lambda w, a: page_of(a)["attempt_id"] == w.attempt_id),
    ("POST", "/rollouts/{rollout_id}/attempts"): (
        lambda w: {"worker_id": "w-second"},
        lambda w, a: (a["status"], a["attempt"]["sequence_id"], a["attempt"]["worker_id"]) == ("preparing", 2, "w-second"),
    ),
    ("POST", "/rollouts/{rollout_id}/attempts/search"): (
        lambda w: {"sort_by": "start_time"},
        lambda w, a: page_of(a)["attempt_id"] == w.attempt_id,
    ),
    ("GET", "/rollouts/{rollout_id}/attempts/latest"): (lambda w: None, lambda w, a: a["attempt_id"] == w.attempt_id),
    ("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}"): (
        lambda w: {"status": "running", "metadata": {"a": 1}, "last_heartbeat_time": 1_790_000_000.5},
        lambda w, a: (
            (a["status"], a["metadata"], a["last_heartbeat_time"], a["worker_id"]) == ("running", {"a": 1}, 1_790_000_000.5, "w-begun")
        ),
    ),
    ("GET", "/resources"): (
        lambda w: {"resources_id": w.resources_id, "sort_by": "update_time"},
        lambda w, a: page_of(a)["resources"] == {"p": PROMPT},
    ),
    ("POST", "/resources"): (
        lambda w: {"resources": {"p": PROMPT, "m": {"resource_type": "llm", "endpoint": "http://m", "model": "x"}}},
        lambda w, a: a["version"] == 1 and a["resources"]["m"]["endpoint"] == "http://m" and a["resources_id"].startswith("rs-"),
    ),
    ("GET", "/resources/latest"): (lambda w: None, lambda w, a: a["resources_id"] == w.resources_id),
    ("GET", "/resources/{resources_id}"): (lambda w: None, lambda w, a: a["resources"] == {"p": PROMPT}),
    ("POST", "/resources/{resources_id}"): (
        lambda w: {"resources": {"other": PROMPT}, "resources_id": w.resources_id},
        lambda w, a: (a["version"], list(a["resources"])) == (2, ["other"]),
    ),
    ("POST", "/spans"): (
        lambda w: w.span(),
        lambda w, a: {**a, "sequence_id": 1} == {**w.span(), **a, "sequence_id": 1} and a["sequence_id"] >= 1,
    ),
    ("GET", "/spans"): (
        lambda w: w.stored() or {"rollout_id": w.rollout_id, "attempt_id": "latest"},
        lambda w, a: (
            (page_of(a)["name"], page_of(a)["attributes"]["ids"], page_of(a)["start_time"], page_of(a)["status"])
            == ("made", [1, 2], 1_790_000_000.25, OK)
        ),
    ),
    ("POST", "/spans/search"): (stored, lambda w, a: (page_of(a)["trace_id"], page_of(a)["span_id"]) == (TRACE, SPAN)),
    ("POST", "/spans/next"): (
        lambda w: {"rollout_id": w.rollout_id, "attempt_id": w.attempt_id},
        lambda w, a: a == {"sequence_id": 1},
    ),
    ("GET", "/workers"): (
        lambda w: {"worker_id_contains": "begun", "status_in": ["busy", "idle", "unknown"]},
        lambda w, a: page_of(a)["worker_id"] == "w-begun",
    ),
    ("POST", "/workers/search"): (
        lambda w: {"worker_id_contains": "w-begun"},
        lambda w, a: page_of(a)["current_rollout_id"] == w.rollout_id,
    ),
    ("GET", "/workers/{worker_id}"): (lambda w: None, lambda w, a: (a["status"], a["current_attempt_id"]) == ("busy", w.attempt_id)),
    ("POST", "/workers/{worker_id}"): (
        lambda w: {"heartbeat_stats": {"cpu": 0.5}},
        lambda w, a: a["heartbeat_stats"] == {"cpu": 0.5} and a["last_heartbeat_time"] is not None,
    ),
    ("POST", "/waits/rollouts"): (finished, lambda w, a: (only(a)["rollout_id"], only(a)["status"]) == (w.rollout_id, "succeeded")),
}


def test_every_route_has_a_case() -> None:
    assert set(CASES) == {(route.method, route.path) for route in ROUTES} and len(ROUTES) == 28


@pytest.mark.parametrize(("method", "path", "status"), [(route.method, route.path, route.status) for route in ROUTES])
def test_a_route_answers_as_in_0_3(web: Web, method: str, path: str, status: int) -> None:
    given, check = CASES[method, path]
    world = World(web)
    payload = given(world)
    answer = web.rest(method, world.path(path), payload)
    assert answer.status == status, answer.body
    assert check(world, answer.json), answer.json


def test_an_empty_result_is_not_an_error(web: Web) -> None:
    world = World(web)
    emptied(world)
    assert web.rest("POST", "/queues/rollouts/dequeue", {"worker_id": "w-idle"}).json == []
    queued = world.queued()
    assert web.rest("GET", f"/rollouts/{queued}/attempts/latest").json is None
    assert web.rest("GET", f"/rollouts/{queued}/attempts").json["items"] == []
    assert web.rest("POST", "/waits/rollouts", {"rollout_ids": [queued], "timeout": 0}).json == []


def test_storing_a_span_twice_answers_null(web: Web) -> None:
    world = World(web)
    world.stored()
    again = web.rest("POST", "/spans", world.span())
    assert (again.status, again.json) == (201, None)


WRONG: list[tuple[str, str, Any, int, str]] = [
    ("GET", "/rollouts", {"limit": -2}, 400, "limit is -2"),
    ("GET", "/rollouts", {"offset": -1}, 400, "offset"),
    ("GET", "/rollouts", {"sort_by": "nothing"}, 400, "sort_by 'nothing'"),
    ("GET", "/rollouts", {"status_in": ["happy"]}, 400, "status_in"),
    ("POST", "/rollouts/search", {"colour": "red"}, 400, "colour"),
    ("POST", "/rollouts/{rollout_id}", {"status": None}, 400, "status"),
    ("POST", "/rollouts/{rollout_id}", {"config": None}, 400, "config"),
    ("POST", "/rollouts/{rollout_id}/attempts/latest", {"worker_id": None}, 400, "worker_id"),
    ("POST", "/rollouts/{rollout_id}/attempts/at-none", {"status": "failed"}, 404, "at-none"),
    ("POST", "/queues/rollouts/enqueue", {"rollouts": [{"mode": "train"}]}, 400, "input"),
    ("POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": 1, "priority": 2**64}]}, 400, "priority"),
    ("POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": 1, "mode": "production"}]}, 400, "the mode production"),
    ("POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": [float("nan")]}]}, 400, "an input holds NaN"),
    ("POST", "/rollouts", {"input": float("-inf")}, 400, "an input holds NaN or Infinity"),
    ("POST", "/rollouts/{rollout_id}", {"input": float("inf")}, 400, "an input holds NaN or Infinity"),
    ("POST", "/queues/rollouts/dequeue", {"limit": 2**64 - 1}, 400, "limit"),
    ("POST", "/resources", {"resources": {"p": {"resource_type": "magic"}}}, 400, "p"),
    ("POST", "/spans", {"name": "x"}, 400, "rollout_id"),
    ("GET", "/spans", {}, 400, "rollout_id"),
    ("GET", "/rollouts/ro-none", None, 404, "ro-none"),
    ("POST", "/rollouts/ro-none", {"status": "failed"}, 404, "ro-none"),
    ("POST", "/rollouts/ro-none/attempts", {}, 404, "ro-none"),
    ("GET", "/resources/rs-none", None, 404, "rs-none"),
    ("GET", "/workers/w-none", None, 404, "w-none"),
]


def test_an_invalid_request_names_its_error_and_is_never_a_500(web: Web) -> None:
    world = World(web)
    for method, path, given, status, word in WRONG:
        answer = web.rest(method, world.path(path), given)
        assert answer.status == status and word in answer.json["detail"], (method, path, given, answer)
        assert "Traceback" not in answer.json["detail"]
    answer = web.call("POST", "/v1/agl/rollouts", b"{", {"Content-Type": "application/json"})
    assert answer.status == 400, answer
    assert [web.call(method, "/v1/agl/nothing").status for method in ("GET", "DELETE")] == [404, 404]


def test_a_body_of_many_rollouts_is_enqueued_in_order_or_refused_whole(web: Web) -> None:
    rollouts: list[dict[str, Any]] = [{"input": {"n": n, "text": "x" * 100}} for n in range(1100)]
    made = web.rest("POST", "/queues/rollouts/enqueue", {"rollouts": rollouts})
    assert made.status == 201 and [each["input"] for each in made.json] == [each["input"] for each in rollouts]
    ids = [each["rollout_id"] for each in made.json]
    found = web.rest("POST", "/rollouts/search", {"rollout_id_in": ids}).json
    assert [each["rollout_id"] for each in found["items"]] == ids and found["total"] == 1100
    before = web.rest("GET", "/statistics").json["total_rollouts"]
    for wrong, says in (
        ({"mode": "x"}, "rollouts.1100.mode"),
        ({"rollout_id": "a b"}, "'a b' is not allowed"),
        ({"input": float("nan")}, "NaN"),
    ):
        refused = web.rest("POST", "/queues/rollouts/enqueue", {"rollouts": [*rollouts, {"input": 1, **wrong}]})
        assert refused.status == 400 and says in refused.json["detail"], refused
    assert web.rest("GET", "/statistics").json["total_rollouts"] == before


def test_every_refusal_is_json_with_a_detail(web: Web) -> None:
    large = b" " * ((64 << 20) + 1)
    for method, path, body, headers, status, word in [
        ("GET", "/v1/agl/nosuch", None, {}, 404, "nothing is served at /v1/agl/nosuch"),
        ("GET", "/v1/nosuch", None, {}, 404, "nothing is served at /v1/nosuch"),
        ("DELETE", "/v1/agl/rollouts", None, {}, 405, "/v1/agl/rollouts takes GET, POST, not DELETE"),
        ("GET", "/v1/traces", None, {}, 405, "/v1/traces takes POST, not GET"),
        ("POST", "/v1/agl/spans", large, {}, 413, "64 MiB"),
        ("POST", "/v1/agl/spans", b"{}", {"Content-Encoding": "gzip"}, 400, "the body"),
        ("POST", "/v1/agl/spans", b"[" * 100_000, {}, 400, "the body is wrong: Invalid JSON: recursion limit exceeded"),
        ("POST", "/v1/agl/sql", b"{", {}, 400, "the body is wrong: Invalid JSON: EOF"),
        ("POST", "/v1/agl/sql", b"[]", {}, 400, "the body is wrong: Input should be an object"),
        ("POST", "/v1/traces", b"{}", {"Origin": "http://elsewhere.example"}, 403, "may not call this service"),
        ("GET", "/v1/agl/rollouts", None, {"Host": "elsewhere.example"}, 403, "this service is not called 'elsewhere.example'"),
    ]:
        answer = web.call(method, path, body, {"Content-Type": "application/json", **headers})
        assert (answer.status, answer.headers.get_content_type()) == (status, "application/json"), (method, path, answer)
        assert word in answer.json["detail"], answer
    refused = web.call("DELETE", "/v1/agl/rollouts", headers={"Origin": ORIGIN})
    assert refused.headers["Allow"] == "GET,POST" and refused.headers["Access-Control-Allow-Origin"] == ORIGIN


async def test_a_client_of_0_3_needs_only_the_address(web: Web) -> None:
    store = LightningStoreClient(web.url)
    try:
        rollout = await store.enqueue_rollout({"q": 7}, mode="train")
        shown = web.rest("GET", f"/rollouts/{rollout.rollout_id}").json
        assert shown["input"] == {"q": 7} and shown["status"] == "queuing"
        assert [r.rollout_id for r in await store.query_rollouts([rollout.rollout_id])] == [rollout.rollout_id]
        assert await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=0) == []
    finally:
        await store.close()

from __future__ import annotations

from agl_otel.store import LightningStore
from agl_otel.types import LLM, PromptTemplate, ProxyLLM


async def test_resources_have_versions_and_the_latest_written_counts(store: LightningStore) -> None:
    made = await store.add_resources({"llm": LLM(endpoint="http://m/v1", model="m"), "prompt": "Say {what}."})
    assert made.resources_id.startswith("rs-") and made.version == 1
    assert made.resources["prompt"] == PromptTemplate(template="Say {what}.", engine="f-string")  # a plain string is a template
    other = await store.add_resources({"p": ProxyLLM(endpoint="http://p", model="m")})
    assert (await store.get_latest_resources()) == other
    again = await store.update_resources(made.resources_id, {"prompt": "Do {what}."})
    assert (again.version, list(again.resources), again.create_time) == (2, ["prompt"], made.create_time)
    assert await store.get_latest_resources() == again == await store.get_resources_by_id(made.resources_id)
    rollout = await store.enqueue_rollout("task")
    assert (rollout.resources_id, rollout.resources_version) == (made.resources_id, 2)


async def test_an_unknown_resources_id_is_created_and_found_by_part_of_its_name(store: LightningStore) -> None:
    assert await store.get_resources_by_id("my-own-id") is None
    made = await store.update_resources("my-own-id", {})
    assert (made.resources_id, made.version) == ("my-own-id", 1)
    assert list(await store.query_resources(resources_id="my-own-id")) == [made]
    page = await store.query_resources(resources_id_contains="own", sort_by="update_time", sort_order="desc", limit=1)
    assert (list(page), page.total) == ([made], 1)


async def test_a_heartbeat_makes_a_worker_known_and_never_changes_its_status(store: LightningStore) -> None:
    assert await store.get_worker_by_id("w-new") is None
    worker = await store.update_worker("w-new", {"cpu": 0.5})
    assert (worker.status, worker.heartbeat_stats) == ("unknown", {"cpu": 0.5})
    again = await store.update_worker("w-new")
    assert again.heartbeat_stats == {"cpu": 0.5}
    assert worker.last_heartbeat_time is not None and (again.last_heartbeat_time or 0) >= worker.last_heartbeat_time
    page = await store.query_workers(status_in=["unknown"], worker_id_contains="w-new", limit=5)
    assert ([w.worker_id for w in page], page.total) == (["w-new"], 1)
    assert list(await store.query_workers(status_in=["busy"], worker_id_contains="w-new")) == []


async def test_an_idle_worker_finds_no_rollout(store: LightningStore) -> None:
    while await store.dequeue_many_rollouts(limit=64):
        pass
    assert await store.dequeue_rollout("w-idle") is None
    worker = await store.get_worker_by_id("w-idle")
    assert worker is not None and worker.status == "idle" and worker.last_dequeue_time is not None

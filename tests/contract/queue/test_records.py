"""Queries, resources, numbers, services and leases: storing and finding them."""

from __future__ import annotations

import pytest

from agl_otel.errors import UsageError
from agl_otel.queue.client import RolloutUpdate
from agl_otel.queue.operations import query as queries
from agl_otel.types import LLM, AttemptedRollout, EnqueueRolloutRequest, PromptTemplate, Rollout
from tests.local_queue import LocalQueue


async def filled(queue: LocalQueue) -> list[Rollout]:
    requests = [EnqueueRolloutRequest(input=i, mode="train" if i % 2 else "val", rollout_id=f"ro-{i}") for i in range(5)]
    rollouts = await queue.client.enqueue(requests)
    await queue.client.claim(2)
    return rollouts


async def ids(queue: LocalQueue, **query: object) -> list[str]:
    return [r.rollout_id for r in await queue.client.query_rollouts(**query)]  # pyright: ignore[reportArgumentType] - a test's shorthand


async def test_rollouts_are_found_by_each_filter(queue: LocalQueue) -> None:
    await filled(queue)
    assert await ids(queue) == ["ro-0", "ro-1", "ro-2", "ro-3", "ro-4"]
    assert await ids(queue, status_in=["preparing"]) == ["ro-0", "ro-1"]
    assert await ids(queue, rollout_id_in=["ro-3", "ro-1", "ro-none"]) == ["ro-1", "ro-3"]
    assert await ids(queue, rollout_id_contains="-4") == ["ro-4"]
    assert await ids(queue, mode_in=["train"]) == ["ro-1", "ro-3"]
    assert await ids(queue, mode_in=["train"], status_in=["preparing"]) == ["ro-1"]
    assert await ids(queue, mode_in=["train"], status_in=["preparing"], filter_logic="or") == ["ro-0", "ro-1", "ro-3"]


async def test_rollouts_are_found_by_a_text_of_their_input_and_by_their_attempts(queue: LocalQueue) -> None:
    inputs = [{"question": 'say "hé"\n100%'}, "plain", {"question": "say nothing"}]
    for number, given in enumerate(inputs):
        await queue.client.enqueue([EnqueueRolloutRequest(input=given, rollout_id=f"ro-{number}", mode="train", metadata={"run": "r"})])
    await queue.client.claim(3)
    await queue.client.start_attempt(["ro-1"])
    for text in ('"hé"\n', "hé", "100%", '"question":"say \\"h'):
        assert await ids(queue, input_contains=text) == ["ro-0"], text
    assert await ids(queue, input_contains="say") == ["ro-0", "ro-2"]
    assert await ids(queue, input_contains="%") == ["ro-0"], "no wildcards"
    assert await ids(queue, input_contains="") == ["ro-0", "ro-1", "ro-2"]
    assert await ids(queue, attempts_from=2) == ["ro-1"]
    assert await ids(queue, attempts_from=2, input_contains="say") == []
    assert await ids(queue, attempts_from=2, input_contains="hé", filter_logic="or") == ["ro-0", "ro-1"]
    page = await queue.client.query_rollouts(input_contains="say", run="r", status_in=["preparing"], sort_by="start_time", limit=1)
    assert ([r.rollout_id for r in page], page.total) == (["ro-0"], 2)
    assert len(await queue.client.query_rollouts(status_in=["failed"], attempts_from=1, sort_by="end_time", limit=1)) == 0


async def test_only_inputs_of_the_latest_rollouts_are_searched(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "SEARCHED_INPUTS", 2)
    await queue.client.enqueue([EnqueueRolloutRequest(input="same", rollout_id=f"ro-{number}") for number in range(4)])
    assert await ids(queue, input_contains="same") == ["ro-2", "ro-3"]


async def test_an_empty_list_of_values_matches_nothing(queue: LocalQueue) -> None:
    await filled(queue)
    assert await ids(queue, status_in=[]) == []
    assert await ids(queue, rollout_id_in=[], mode_in=["val"]) == []
    assert await ids(queue, rollout_id_in=[], mode_in=["train"], filter_logic="or") == ["ro-1", "ro-3"]


async def test_a_page_has_the_total_number_of_matches(queue: LocalQueue) -> None:
    await filled(queue)
    page = await queue.client.query_rollouts(sort_by="rollout_id", sort_order="desc", limit=2, offset=1)
    assert ([r.rollout_id for r in page], page.total, page.limit, page.offset) == (["ro-3", "ro-2"], 5, 2, 1)
    nothing = await queue.client.query_rollouts(limit=0)
    assert (list(nothing), nothing.total, nothing.limit) == ([], 5, 0)
    both = ["ro-0", "ro-1"]
    assert list(await queue.client.query_attempts(both, limit=0)) == list(await queue.client.query_workers(limit=0)) == []
    with pytest.raises(UsageError, match="cannot sort by 'color'"):
        await queue.client.query_rollouts(sort_by="color")


async def test_a_queried_rollout_carries_its_latest_attempt_and_no_token(queue: LocalQueue) -> None:
    await filled(queue)
    await queue.client.start_attempt(["ro-0"])
    first, *_, last = await queue.client.query_rollouts()
    assert isinstance(first, AttemptedRollout)
    assert (first.attempt.sequence_id, first.token) == (2, None)
    assert not isinstance(last, AttemptedRollout)


async def test_attempts_are_listed_by_number_or_the_latest_alone(queue: LocalQueue) -> None:
    await filled(queue)
    await queue.client.start_attempt(["ro-0"])
    both = ["ro-0", "ro-1", "ro-none"]
    assert [(a.rollout_id, a.sequence_id) for a in await queue.client.query_attempts(both)] == [("ro-0", 1), ("ro-0", 2), ("ro-1", 1)]
    assert [a.sequence_id for a in await queue.client.query_attempts(["ro-0"], sort_order="desc")] == [2, 1]
    assert [(a.rollout_id, a.sequence_id) for a in await queue.client.query_attempts(both, latest_only=True)] == [("ro-0", 2), ("ro-1", 1)]
    page = await queue.client.query_attempts(both, limit=1)
    assert (len(page), page.total) == (1, 3)


async def test_deletion_removes_rollouts_and_what_belongs_to_them(queue: LocalQueue) -> None:
    await filled(queue)
    await queue.client.take_sequence([("ro-0", 7, 0)])
    assert await queue.client.delete(["ro-0", "ro-none"]) == 1
    assert "ro-0" not in await ids(queue)
    assert len(await queue.client.query_attempts(["ro-0"])) == 0
    assert await queue.client.take_sequence([("ro-0", 1, 0)]) == [1]


async def test_dead_letters_are_paged_by_the_time_of_their_end(queue: LocalQueue) -> None:
    rollouts = await filled(queue)
    for name in (3, 0, 4, 1):
        queue.clock.advance(1)
        status = "cancelled" if name == 4 else "failed"
        await queue.client.update_rollouts([RolloutUpdate(rollout_id=rollouts[name].rollout_id, status=status)])
    query = {"status_in": ["failed"], "sort_by": "end_time"}
    assert await ids(queue, **query, sort_order="desc", limit=2) == ["ro-1", "ro-0"]
    assert await ids(queue, **query, sort_order="desc", limit=2, offset=2) == ["ro-3"]
    assert await ids(queue, **query, limit=9) == ["ro-3", "ro-0", "ro-1"]
    assert await ids(queue, **query, mode_in=["train"], sort_order="desc", limit=9) == ["ro-1", "ro-3"]
    assert await ids(queue, **query, mode_in=["val"], filter_logic="or", sort_order="desc", limit=2) == ["ro-1", "ro-4"]
    assert await ids(queue, **query, rollout_id_in=["ro-0"], limit=9) == ["ro-0"]
    assert await ids(queue, **query, ended_before=queue.clock.now, limit=9) == ["ro-3", "ro-0"]
    page = await queue.client.query_rollouts(status_in=["failed"], sort_by="end_time", limit=1)
    assert page.total == 3


async def test_statistics_count(queue: LocalQueue) -> None:
    await filled(queue)
    queue.clock.advance(7)
    await queue.client.update_rollouts([RolloutUpdate(rollout_id="ro-4", status="cancelled")])
    statistics = await queue.client.statistics()
    assert statistics["rollouts_by_status"] == {"cancelled": 1, "preparing": 2, "queuing": 2}
    assert (statistics["total_rollouts"], statistics["total_attempts"], statistics["claimable"]) == (5, 2, 2)
    assert (statistics["uptime"], statistics["oldest_claimable_age_seconds"]) == (7, 7)


async def test_resources_have_versions_and_the_last_written_is_the_latest(queue: LocalQueue) -> None:
    llm = LLM(endpoint="http://a/v1", model="m", sampling_parameters={"temperature": 0.5})
    first = await queue.client.put_resources({"llm": llm})
    queue.clock.advance(1)
    other = await queue.client.put_resources({"prompt": PromptTemplate(template="{x}", engine="f-string")}, resources_id="mine")
    second = await queue.client.put_resources({"llm": llm.model_copy(update={"model": "n"})}, resources_id=first.resources_id)
    assert (first.version, second.version, second.create_time, second.update_time) == (1, 2, first.create_time, queue.clock.now)
    assert await queue.client.get_resources() == second
    assert await queue.client.get_resources("mine") == other
    assert await queue.client.get_resources(first.resources_id, version=1) == first
    assert await queue.client.get_resources("none") is None
    assert await queue.client.get_resources("mine", version=9) is None
    assert (await queue.client.query_resources()).items == [other, second]
    assert (await queue.client.query_resources(resources_id_contains="mi")).items == [other]
    assert len(await queue.client.query_resources(all_versions=True)) == 3


async def test_resources_put_aside_are_found_by_id_but_are_never_the_latest(queue: LocalQueue) -> None:
    llm = LLM(endpoint="http://a/v1", model="m")
    own = await queue.client.put_resources({"llm": llm}, aside=True)
    assert await queue.client.get_resources() is None
    shared = await queue.client.put_resources({"llm": llm})
    queue.clock.advance(1)
    again = await queue.client.put_resources({"llm": llm}, resources_id=own.resources_id, aside=True)
    assert await queue.client.get_resources() == shared
    assert await queue.client.get_resources(own.resources_id) == again
    assert (await queue.client.query_resources()).items == [shared, again]
    requests = [EnqueueRolloutRequest(input=1), EnqueueRolloutRequest(input=2, resources_id=own.resources_id)]
    pinned = [(r.resources_id, r.resources_version) for r in await queue.client.enqueue(requests)]
    assert pinned == [(shared.resources_id, 1), (own.resources_id, 2)]
    assert (await queue.client.statistics())["total_resources"] == 2


async def test_numbers_grow_by_rollout_and_skip_explicit_ones(queue: LocalQueue) -> None:
    assert await queue.client.take_sequence([("ro-1", 3, 0), ("ro-2", 1, 0), ("", 4, 0), ("ro-1", 2, 0)]) == [1, 1, 0, 4]
    assert await queue.client.take_sequence([("ro-1", 1, 100), ("ro-1", 1, 50)]) == [101, 102]
    assert await queue.client.take_sequence([("ro-1", 0, 200), ("ro-1", 1, 0)]) == [201, 201]


@pytest.mark.parametrize(("count", "at_least"), [(1, 2**53), (1, 2**63 - 1), (2**63 - 1, 0)])
async def test_numbers_past_their_bound_are_refused(queue: LocalQueue, count: int, at_least: int) -> None:
    with pytest.raises(UsageError, match="ro-1"):
        await queue.client.take_sequence([("ro-1", count, at_least)])
    assert await queue.client.take_sequence([("ro-1", 1, 2**53 - 1)]) == [2**53]


async def test_describe_returns_the_registered_services(queue: LocalQueue) -> None:
    await queue.client.announce("collector", "c1", {"collector_http": "http://127.0.0.1:1", "collector_grpc": "127.0.0.1:2"})
    queue.clock.advance(1)
    await queue.client.announce("collector", "c2", {"collector_http": "http://127.0.0.1:3"})
    described = await queue.client.announce("proxy", "p", {"proxy": "http://0.0.0.0:4"})
    assert described == await queue.client.describe()
    assert (described.queue, described.collector_http, described.collector_grpc) == (
        queue.client.address,
        "http://127.0.0.1:3",
        "127.0.0.1:2",
    )
    assert described.collectors == ["http://127.0.0.1:1", "http://127.0.0.1:3"]
    assert (described.proxy, described.proxies) == ("http://127.0.0.1:4", ["http://127.0.0.1:4"])
    await queue.client.announce("proxy", "p", {}, gone=True)
    assert (await queue.client.describe()).proxies == []


async def test_a_registration_expires_after_its_seconds(queue: LocalQueue) -> None:
    address = {"collector_http": "http://127.0.0.1:1"}
    await queue.client.announce("proxy", "p", {"proxy": "http://127.0.0.1:4"})
    await queue.client.announce("collector", "c", address, seconds=30)
    queue.clock.advance(29)
    assert (await queue.client.announce("collector", "c", address, seconds=30)).collectors == ["http://127.0.0.1:1"]
    queue.clock.advance(29)
    assert (await queue.client.describe()).collector_http == "http://127.0.0.1:1"
    queue.clock.advance(2)
    described = await queue.client.describe()
    assert (described.collector_http, described.collectors, described.proxies) == (None, [], ["http://127.0.0.1:4"])
    with pytest.raises(UsageError, match="more than 0 seconds"):
        await queue.client.announce("collector", "c", address, seconds=0)


async def test_a_registration_does_not_expire_while_the_queue_is_down(queue: LocalQueue) -> None:
    await queue.client.announce("collector", "c", {"collector_http": "http://127.0.0.1:1"}, seconds=30)
    queue.clock.advance(3600)
    await queue.restart()
    assert len((await queue.client.describe()).collectors) == 1
    queue.clock.advance(30)
    assert (await queue.client.describe()).collectors == []


async def test_finished_rollouts_are_found_by_when_they_ended(queue: LocalQueue) -> None:
    await filled(queue)
    await queue.client.update_rollouts([RolloutUpdate(rollout_id="ro-4", status="cancelled")])
    queue.clock.advance(10)
    await queue.client.update_rollouts([RolloutUpdate(rollout_id="ro-3", status="failed")])
    assert await ids(queue, ended_before=queue.clock.now) == ["ro-4"]
    assert await ids(queue, ended_before=queue.clock.now + 1, limit=1) == ["ro-3"]
    assert await ids(queue, ended_before=queue.clock.now + 1, status_in=["cancelled"], mode_in=["train"], filter_logic="or") == [
        "ro-3",
        "ro-4",
    ]
    await queue.client.update_rollouts([RolloutUpdate(rollout_id="ro-4", status="queuing")])
    assert await ids(queue, ended_before=queue.clock.now) == []


async def test_a_lease_has_one_holder_until_it_ends(queue: LocalQueue) -> None:
    assert await queue.client.lease("maintain", "a", 10)
    assert not await queue.client.lease("maintain", "b", 10)
    assert await queue.client.lease("maintain", "a", 10)
    queue.clock.advance(10)
    assert await queue.client.lease("maintain", "b", 10)
    assert not await queue.client.lease("maintain", "b", 0)
    assert await queue.client.lease("maintain", "a", 1)


async def test_everything_is_there_after_a_restart(queue: LocalQueue) -> None:
    rollouts = await filled(queue)
    await queue.client.put_resources({"llm": LLM(endpoint="http://a/v1", model="m")}, resources_id="r")
    before = (await queue.client.query_rollouts()).items, await queue.client.get_resources()
    await queue.restart()
    assert ((await queue.client.query_rollouts()).items, await queue.client.get_resources()) == before
    assert [c.input for c in await queue.client.claim(9)] == [r.input for r in rollouts[2:]]

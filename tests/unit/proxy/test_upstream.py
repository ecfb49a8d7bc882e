from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agl_otel.errors import NotFoundError, RefusedError, UnavailableError, UsageError
from agl_otel.proxy.budget import Budget
from agl_otel.proxy.models import ModelList
from agl_otel.proxy.upstream import OWN, VERSION_SECONDS, QueueUpstreams, Route, Upstream, call_seed
from agl_otel.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    NamedResources,
    PaginatedResult,
    PromptTemplate,
    ResourcesUpdate,
    Rollout,
)

KEY = ("ro-1", "at-1")


async def only(upstreams: QueueUpstreams, asked: str | None = None) -> Upstream:
    (upstream,) = (await upstreams.resolve(KEY, asked)).pool
    return upstream


def attempt(attempt_id: str, status: AttemptStatus, number: int = 1) -> Attempt:
    return Attempt(rollout_id="ro-1", attempt_id=attempt_id, sequence_id=number, start_time=0, status=status)


class OneRollout:
    """A queue with one rollout with these resources."""

    def __init__(self, resources: NamedResources) -> None:
        self.update = ResourcesUpdate(resources_id="rs-1", create_time=0, update_time=0, version=3, resources=resources)
        self.asked = 0
        self.metadata: dict[str, Any] | None = None
        self.attempts: list[Attempt] = []
        self.resources_id: str | None = "rs-1"

    async def query_rollouts(self, *, rollout_id_in: Sequence[str]) -> PaginatedResult[Rollout]:
        self.asked += 1
        (rollout_id,) = rollout_id_in
        pinned = {"resources_id": self.resources_id, "resources_version": 3 if self.resources_id else None}
        fields: dict[str, Any] = {"input": None, "start_time": 0, **pinned, "metadata": self.metadata}
        if not self.attempts:
            return PaginatedResult([Rollout(rollout_id=rollout_id, **fields)])
        return PaginatedResult([AttemptedRollout(rollout_id=rollout_id, attempt=self.attempts[-1], **fields)])

    async def query_attempts(self, rollout_ids: Sequence[str]) -> PaginatedResult[Attempt]:
        return PaginatedResult(self.attempts)

    async def get_resources(self, resources_id: str | None = None, *, version: int | None = None) -> ResourcesUpdate | None:
        return self.update


async def test_the_fallback_key_is_sent_to_that_server_only() -> None:
    for endpoint, key in (("http://here/v1/", "person"), ("http://elsewhere/v1", "")):
        upstreams = QueueUpstreams(
            OneRollout({"m": LLM(endpoint=endpoint, model="")}), fallback_url="http://here/v1", fallback_key="person"
        )
        assert (await only(upstreams)).api_key == key


async def test_the_resources_key_wins_and_an_empty_model_is_the_agents_choice() -> None:
    queue = OneRollout({"m": LLM(endpoint="http://here/v1", model="", api_key="own")})
    upstream = await only(QueueUpstreams(queue, fallback_url="http://here/v1", fallback_key="person"))
    assert (upstream.api_key, upstream.model, upstream.version) == ("own", None, "3")


async def test_rollouts_that_are_looked_up_at_once_share_a_query() -> None:
    class Rollouts(OneRollout):
        def __init__(self, resources: NamedResources) -> None:
            super().__init__(resources)
            self.queries: list[list[str]] = []
            self.begun = asyncio.Event()
            self.fails = False

        async def query_rollouts(self, *, rollout_id_in: Sequence[str]) -> PaginatedResult[Rollout]:
            self.queries.append([*rollout_id_in])
            self.begun.set()
            await asyncio.sleep(0.01)
            if self.fails:
                raise UnavailableError("the queue is away")
            found = [Rollout(rollout_id=each, input=None, start_time=0, resources_id="rs-1", resources_version=3) for each in rollout_id_in]
            return PaginatedResult([each for each in found if each.rollout_id != "ro-none"])

    queue = Rollouts({"m": LLM(endpoint="http://here/v1", model="x")})
    upstreams = QueueUpstreams(queue)

    async def resolved(*rollout_ids: str) -> list[object]:
        return await asyncio.gather(*(upstreams.resolve((each, "at-1"), None) for each in rollout_ids), return_exceptions=True)

    first = asyncio.create_task(resolved("ro-1"))
    await queue.begun.wait()
    *routes, unknown = await resolved("ro-2", "ro-3", "ro-none")
    assert [route.pool[0].model for route in (*await first, *routes) if isinstance(route, Route)] == ["x"] * 3
    assert isinstance(unknown, NotFoundError) and "ro-none" in str(unknown)
    assert queue.queries == [["ro-1"], ["ro-2", "ro-3", "ro-none"]]
    queue.fails = True
    assert [type(each) for each in await resolved("ro-4", "ro-5")] == [UnavailableError] * 2
    queue.fails = False
    assert all(isinstance(each, Route) for each in await resolved("ro-4", "ro-5"))


async def test_a_rollout_is_looked_up_once() -> None:
    queue = OneRollout({"m": LLM(endpoint="http://here/v1", model="x")})
    upstreams = QueueUpstreams(queue)
    assert [(await only(upstreams)).model for _ in range(3)] == ["x"] * 3
    assert queue.asked == 1


async def test_a_version_unused_for_an_hour_leaves_the_cache() -> None:
    now = [0.0]
    asked: list[str | None] = []

    class Versions(OneRollout):
        """A queue in which each rollout has its own resources."""

        async def query_rollouts(self, *, rollout_id_in: Sequence[str]) -> PaginatedResult[Rollout]:
            self.resources_id = f"rs-{rollout_id_in[0]}"
            return await super().query_rollouts(rollout_id_in=rollout_id_in)

        async def get_resources(self, resources_id: str | None = None, *, version: int | None = None) -> ResourcesUpdate | None:
            asked.append(resources_id)
            return self.update

    upstreams = QueueUpstreams(Versions({"m": LLM(endpoint="http://here/v1", model="x")}), clock=lambda: now[0])

    async def call(rollout_id: str, at: float) -> None:
        now[0] = at
        upstreams.forget((rollout_id, "at-1"))
        await upstreams.resolve((rollout_id, "at-1"), None)

    await call("one", 0)
    await call("two", 1)
    await call("one", VERSION_SECONDS - 1)
    assert asked == ["rs-one", "rs-two"]
    await call("three", VERSION_SECONDS + 2)
    await call("one", VERSION_SECONDS + 3)
    await call("two", VERSION_SECONDS + 3)
    assert asked == ["rs-one", "rs-two", "rs-three", "rs-two"]


async def test_resources_without_a_model_server_are_an_error_that_names_them() -> None:
    upstreams = QueueUpstreams(OneRollout({"m": LLM(endpoint="http://proxy/v1", model="x")}), own_urls=["http://proxy"])
    with pytest.raises(NotFoundError, match="no LLM among its resources"):
        await only(upstreams)
    with pytest.raises(NotFoundError, match=r"rs-1 version 3.*AGL_UPSTREAM_URL"):
        await only(QueueUpstreams(OneRollout({})))
    with pytest.raises(NotFoundError, match="AGL_UPSTREAM_URL"):
        await upstreams.resolve(None, None)


async def test_the_agent_chooses_by_model_or_by_name_and_equal_models_are_one_pool() -> None:
    llms: NamedResources = {
        "actor": LLM(endpoint="http://a/v1", model="policy"),
        "judge": LLM(endpoint="http://j/v1", model="big"),
        "second": LLM(endpoint="http://b/v1/", model="policy"),
    }
    upstreams = QueueUpstreams(OneRollout(llms))
    chosen = {
        asked: [u.base_url for u in (await upstreams.resolve(KEY, asked)).pool] for asked in (None, "unknown", "policy", "big", "judge")
    }
    actors, judges = ["http://a/v1", "http://b/v1"], ["http://j/v1"]
    assert chosen == {None: actors, "unknown": actors, "policy": actors, "big": judges, "judge": judges}


async def test_a_resource_that_names_the_proxy_uses_its_model_list() -> None:
    models = ModelList([{"model_name": "m*", "litellm_params": {"model": "hosted_vllm/x", "api_base": "http://v/v1/", "top_p": 0.5}}])
    queue = OneRollout({"main": LLM(endpoint="http://proxy", model="mine", sampling_parameters={"temperature": 1})})
    upstream = await only(QueueUpstreams(queue, models=models, own_urls=["http://proxy"]))
    assert (upstream.base_url, upstream.model, upstream.version, upstream.sampling) == (
        "http://v/v1",
        "x",
        "3",
        {"top_p": 0.5, "temperature": 1},
    )
    (free,) = (await QueueUpstreams(queue, models=models).resolve(None, "m1")).pool
    assert free.model == "x"


async def test_a_resource_that_names_the_proxy_goes_upstream_without_a_listed_model() -> None:
    for endpoint, model in ((OWN, ""), (OWN, "mine"), ("http://proxy/v1", "")):
        queue = OneRollout({"main": LLM(endpoint=endpoint, model=model)})
        upstreams = QueueUpstreams(queue, fallback_url="http://here/v1", fallback_key="k", own_urls=["http://proxy"])
        assert await only(upstreams) == Upstream("http://here/v1", model or None, "k", {}, "3")
        with pytest.raises(NotFoundError, match="AGL_UPSTREAM_URL"):
            await only(QueueUpstreams(queue, own_urls=["http://proxy"]))


async def test_a_rollout_without_a_model_uses_the_proxys_current_one() -> None:
    queue = OneRollout({"prompt": PromptTemplate(template="{x}", engine="f-string")})
    queue.metadata = {"budget": {"calls": 5}, "sampling_seed": 7}
    models = ModelList()
    upstreams = QueueUpstreams(queue, models=models, fallback_url="http://here/v1", fallback_key="person")
    route = await upstreams.resolve(KEY, "x")
    assert (route.pool, route.budget, route.seed) == ([Upstream("http://here/v1", None, "person", version="3")], Budget(5, None), 7)
    models.replace([{"model_name": "x", "litellm_params": {"model": "hosted_vllm/y", "api_base": "http://v/v1"}}])
    assert (await only(upstreams, "x")).model == "y"


async def test_resources_published_after_enqueue_are_not_used() -> None:
    queue = OneRollout({"m": LLM(endpoint="http://later/v1", model="x")})
    queue.resources_id = None
    assert await only(QueueUpstreams(queue, fallback_url="http://here/v1")) == Upstream("http://here/v1")
    with pytest.raises(NotFoundError, match="before you enqueue"):
        await only(QueueUpstreams(queue))


async def test_calls_of_no_rollout_may_go_to_several_servers() -> None:
    upstreams = QueueUpstreams(OneRollout({}), fallback_url="http://a/v1, http://b/v1/", fallback_key="k")
    assert [(u.base_url, u.api_key) for u in (await upstreams.resolve(None, "x")).pool] == [("http://a/v1", "k"), ("http://b/v1", "k")]


@pytest.mark.parametrize("status", ["failed", "succeeded", "timeout"])
async def test_a_closed_attempt_is_refused_and_a_running_one_is_not(status: AttemptStatus) -> None:
    queue = OneRollout({"m": LLM(endpoint="http://a/v1", model="x")})
    queue.attempts = [attempt("at-1", status)]
    with pytest.raises(RefusedError, match="is over") as caught:
        await QueueUpstreams(queue).resolve(KEY, None)
    assert caught.value.status == 410
    queue.attempts = [attempt("at-0", "failed"), attempt("at-1", "preparing", 2)]
    upstreams = QueueUpstreams(queue)
    assert (await only(upstreams)).model == "x"
    for attempt_id, error in (("at-0", RefusedError), ("at-unknown", NotFoundError)):
        with pytest.raises(error, match=attempt_id):
            await upstreams.resolve(("ro-1", attempt_id), None)


async def test_a_rollout_may_set_its_budget() -> None:
    queue = OneRollout({"m": LLM(endpoint="http://a/v1", model="x")})
    for metadata, budget in ((None, None), ({"budget": {"calls": 5.0}}, Budget(5, None)), ({"budget": {"tokens": 0}}, Budget(None, 0))):
        queue.metadata = metadata
        assert (await QueueUpstreams(queue).resolve(KEY, None)).budget == budget


@pytest.mark.parametrize(
    "budget", [{"call": 2}, {"calls": "2"}, {"calls": True}, {"calls": -1}, {"calls": 2.5}, {"tokens": float("inf")}, {"calls": None}, 5]
)
async def test_a_budget_that_cannot_be_read_lets_no_call_through(budget: Any) -> None:
    queue = OneRollout({"m": LLM(endpoint="http://a/v1", model="x")})
    queue.metadata = {"budget": budget}
    with pytest.raises(UsageError, match="budget of rollout ro-1 must be"):
        await QueueUpstreams(queue).resolve(KEY, None)


def test_what_a_budget_does_not_limit_the_proxys_default_does() -> None:
    assert Budget(5, None).or_else(Budget(1, 2)) == Budget(5, 2) and Budget(0, 7).or_else(Budget(1, 2)) == Budget(0, 7)


async def test_a_rollout_may_set_its_seed() -> None:
    queue = OneRollout({"m": LLM(endpoint="http://a/v1", model="x")})
    for metadata, seed in ((None, None), ({"sampling_seed": 5}, 5), ({"sampling_seed": "five"}, None), ({"sampling_seed": True}, None)):
        queue.metadata = metadata
        assert (await QueueUpstreams(queue).resolve(KEY, None)).seed == seed
    seeds = {call_seed(seed, call) for seed in range(50) for call in range(1, 50)}
    assert len(seeds) == 50 * 49 and max(seeds) < 2**53 and call_seed(1, 2) == call_seed(1, 2)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"model": "openai/gpt", "api_key": "k"}, ("https://api.openai.com/v1", "gpt", "openai")),
        ({"model": "local", "api_base": "http://l/v1/"}, ("http://l/v1", "local", "openai")),
        ({"model": "anthropic/claude", "temperature": 0}, ("", "anthropic/claude", "litellm")),
    ],
)
def test_entries_of_the_list_go_directly_or_through_litellm(params: dict[str, Any], expected: tuple[str, str, str]) -> None:
    (upstream,) = ModelList([{"model_name": "n", "litellm_params": params}]).find("n")
    assert (upstream.base_url, upstream.model, upstream.provider) == expected


@pytest.mark.parametrize("entry", [{}, {"model_name": "n"}, {"model_name": "n", "litellm_params": {"model": "hosted_vllm/x"}}])
def test_an_invalid_entry_is_named_and_nothing_changes(entry: dict[str, Any]) -> None:
    models = ModelList([{"model_name": "n", "litellm_params": {"model": "openai/x"}}])
    with pytest.raises(UsageError, match="model"):
        models.replace([entry])
    assert models.names() == ["n"]

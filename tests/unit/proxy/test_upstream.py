from __future__ import annotations

from collections.abc import Sequence

import pytest

from agl_otel.errors import NotFoundError
from agl_otel.proxy.upstream import QueueUpstreams
from agl_otel.types import LLM, NamedResources, PaginatedResult, ResourcesUpdate, Rollout


class OneRollout:
    """The queue's side of the seam: one rollout with these resources."""

    def __init__(self, resources: NamedResources) -> None:
        self.update = ResourcesUpdate(resources_id="rs-1", create_time=0, update_time=0, version=3, resources=resources)
        self.asked = 0

    async def query_rollouts(self, *, rollout_id_in: Sequence[str]) -> PaginatedResult[Rollout]:
        self.asked += 1
        return PaginatedResult(
            [Rollout(rollout_id=i, input=None, start_time=0, resources_id="rs-1", resources_version=3) for i in rollout_id_in]
        )

    async def get_resources(self, resources_id: str | None = None, *, version: int | None = None) -> ResourcesUpdate | None:
        return self.update


async def test_the_fallback_key_goes_to_that_server_only() -> None:
    for endpoint, key in (("http://here/v1/", "person"), ("http://elsewhere/v1", "")):
        upstreams = QueueUpstreams(
            OneRollout({"m": LLM(endpoint=endpoint, model="")}), fallback_url="http://here/v1", fallback_key="person"
        )
        assert (await upstreams.resolve("ro-1")).api_key == key


async def test_the_key_of_the_resource_wins_and_an_empty_model_means_the_agents() -> None:
    queue = OneRollout({"m": LLM(endpoint="http://here/v1", model="", api_key="own")})
    upstream = await QueueUpstreams(queue, fallback_url="http://here/v1", fallback_key="person").resolve("ro-1")
    assert (upstream.api_key, upstream.model, upstream.version) == ("own", None, "3")


async def test_a_rollout_is_looked_up_once() -> None:
    queue = OneRollout({"m": LLM(endpoint="http://here/v1", model="x")})
    upstreams = QueueUpstreams(queue)
    assert [(await upstreams.resolve("ro-1")).model for _ in range(3)] == ["x"] * 3
    assert queue.asked == 1


async def test_resources_without_a_model_server_are_named() -> None:
    upstreams = QueueUpstreams(OneRollout({"m": LLM(endpoint="http://proxy/v1", model="x")}), own_urls=["http://proxy"])
    with pytest.raises(NotFoundError, match="rs-1 version 3"):
        await upstreams.resolve("ro-1")
    with pytest.raises(NotFoundError, match="AGL_UPSTREAM_URL"):
        await upstreams.resolve(None)

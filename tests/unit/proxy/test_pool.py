from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from agl_otel.errors import RefusedError
from agl_otel.proxy.gate import Gate
from agl_otel.proxy.pool import Health
from agl_otel.proxy.upstream import Upstream

ENDPOINTS = [Upstream(f"http://{name}/v1") for name in "abc"]


def test_a_rollout_keeps_its_endpoint_and_rollouts_are_spread() -> None:
    health = Health(lambda: 0.0)
    first = {f"ro-{i}": health.order(ENDPOINTS, f"ro-{i}")[0] for i in range(300)}
    assert all(health.order(list(reversed(ENDPOINTS)), rollout)[0] == endpoint for rollout, endpoint in first.items())
    assert all(60 < count < 140 for count in Counter(each.base_url for each in first.values()).values())
    fewer = {rollout: health.order(ENDPOINTS[:2], rollout)[0] for rollout in first}
    assert all(fewer[rollout] == endpoint for rollout, endpoint in first.items() if endpoint != ENDPOINTS[2])


def test_an_endpoint_that_is_down_is_last_for_longer_each_time_then_returns() -> None:
    now = 0.0
    health = Health(lambda: now)
    own = health.order(ENDPOINTS, "ro")[0]
    for seconds in (1.0, 2.0, 4.0):
        health.failed(own)
        now += seconds - 0.01
        assert health.order(ENDPOINTS, "ro")[-1] == own and health.down() == [own.base_url]
        now += 0.02
        assert health.order(ENDPOINTS, "ro")[0] == own
    health.answered(own.base_url)
    health.failed(own)
    now += 1.01
    assert health.is_up(own)


def test_a_canary_that_is_published_again_is_tried_at_once_and_any_other_endpoint_is_not() -> None:
    health = Health(lambda: 0.0)
    canary, usual = Upstream("http://canary/v1", canary=True, version="3"), Upstream("http://usual/v1", version="3")
    for endpoint in (canary, usual):
        health.failed(endpoint)
        assert not health.is_up(endpoint)
    assert health.is_up(replace(canary, version="4")) and not health.is_up(replace(usual, version="4"))
    for _ in range(2):
        health.failed(replace(canary, version="4"))
    assert not health.is_up(replace(canary, version="4"))


async def test_the_gate_holds_calls_until_it_opens_and_waits_for_those_in_flight() -> None:
    gate = Gate()
    await gate.enter()
    closing = asyncio.create_task(gate.close("hold", wait_seconds=60))
    held = asyncio.create_task(gate.enter())
    await asyncio.sleep(0)
    assert gate.held == 1
    assert not closing.done() and not held.done()
    gate.leave()
    assert await closing == 0 and gate.mode == "hold"
    gate.open()
    await held
    assert (gate.in_flight, gate.held, gate.mode) == (1, 0, None)


async def test_a_refusing_gate_gives_a_retry_time_also_to_held_calls() -> None:
    gate = Gate()
    await gate.close("hold", wait_seconds=0)
    held = asyncio.create_task(gate.enter())
    await asyncio.sleep(0)
    assert gate.held == 1
    await gate.close("refuse", wait_seconds=0)
    for call in (held, gate.enter()):
        with pytest.raises(RefusedError) as caught:
            await call
        assert (caught.value.status, caught.value.retry_seconds) == (429, 1)
    assert gate.in_flight == 0


async def test_calls_are_held_for_a_limited_time() -> None:
    gate = Gate(hold_seconds=0.0)
    await gate.close("hold", wait_seconds=0)
    with pytest.raises(RefusedError):
        await gate.enter()


async def test_closing_returns_the_number_of_calls_left() -> None:
    gate = Gate()
    await gate.enter()
    assert await gate.close("refuse", wait_seconds=0.0) == 1

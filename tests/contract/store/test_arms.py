"""Which rewards a step of a canary is judged by: those of conversations that began in it and that one of the two answered alone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agl_otel.jobs.improve_evidence import Arms, arms_since
from agl_otel.store import LightningStore
from agl_otel.types import Span
from agl_otel_hook import conventions


async def talk(store: LightningStore, reward: float, *turns: tuple[str, float], **more: str) -> str:
    """Store a rated conversation with a call at each time, by the LLM of this resource name; return its rollout. `more`: attributes."""
    begun = await store.start_rollout({"question": 1})
    for number, (arm, at) in enumerate(turns, 1):
        call = Span.from_attributes(
            attributes={conventions.LLM_ARM: arm, **more},
            rollout_id=begun.rollout_id,
            attempt_id=begun.attempt.attempt_id,
            sequence_id=number,
            name=conventions.SPAN_LLM,
            start_time=at,
            end_time=at + 0.5,
        )
        await store.add_span(call)
    await store.add_reward(reward, rollout_id=begun.rollout_id)
    return begun.rollout_id


def facts(arms: Arms) -> tuple[list[float], list[float], int, int]:
    return sorted(arms.canary.tolist()), sorted(arms.promoted.tolist()), arms.begun, arms.mixed


async def test_each_step_has_the_conversations_that_began_in_it(store: LightningStore) -> None:
    name, since = "canary-0007", time.time()
    step = since + 100
    await talk(store, 0.1, (name, since + 1))
    await talk(store, 0.2, (name, since + 2), (name, step + 1))
    await talk(store, 0.3, ("promoted", since + 3), ("promoted", step + 2))
    assert facts(await arms_since(store, name, since, None, step=since, version="7", most=3)) == ([0.1, 0.2], [0.3], 2, 0)
    await talk(store, 0.4, ("promoted", since + 4), (name, step + 3))
    await talk(store, 0.5, (name, step + 4), (name, step + 5))
    last = await talk(store, 0.6, ("promoted", step + 6))
    assert facts(await arms_since(store, name, since, None, step=step, version="7", most=3)) == ([0.5], [0.6], 2, 1), (
        "the greater share took one over"
    )
    (found,) = [each for each in await store.arms(since) if each.rollout_id == last]
    assert (found.conversation, [*found.arms], round(found.began - step, 3), round(found.latest - step, 3)) == (
        last,
        ["promoted"],
        6.0,
        6.0,
    )


async def test_a_products_own_span_says_by_whose_prompts_it_answered(store: LightningStore) -> None:
    name, since = "canary-0008", time.time() + 10_000  # the store has conversations of other tests

    async def said(reward: float, *arms: str) -> None:
        """Store a conversation with the product's span and, with a second arm, a call by the proxy."""
        begun = await store.start_rollout({"question": 1})
        ids: dict[str, Any] = {"rollout_id": begun.rollout_id, "attempt_id": begun.attempt.attempt_id}
        for number, (arm, span) in enumerate(zip(arms, ("POST /chat", conventions.SPAN_LLM), strict=False), 1):
            attributes = {conventions.LLM_ARM if span == conventions.SPAN_LLM else conventions.SERVED_ARM: arm}
            await store.add_span(
                Span.from_attributes(attributes=attributes, name=span, sequence_id=number, start_time=since + number, **ids)
            )
        await store.add_reward(reward, rollout_id=begun.rollout_id)

    await said(0.1, name, name)
    await said(0.2, name)
    await said(0.3, "promoted")
    await said(0.4, name, "promoted")
    await said(0.5, "promoted", name)
    assert facts(await arms_since(store, name, since, None, step=since, version="7", most=3)) == ([0.1, 0.2], [0.3], 4, 2), (
        "who had both counts for neither"
    )


async def test_what_an_earlier_step_has_taken_fills_no_later_one(store: LightningStore) -> None:
    name, since = "canary-0010", time.time() + 15_000
    step = since + 10
    for number in range(3):
        turns = [("promoted", since + number), (name, since + 3 + number), (name, step + number)]
        await talk(store, 0.1, *turns)
    arms = await arms_since(store, name, since, None, step=step, version="8", most=3)
    assert (*facts(arms), arms.filled) == ([], [], 0, 3, None)


async def test_a_canary_that_fails_has_taken_the_conversation_and_one_that_is_full_has_not(store: LightningStore) -> None:
    name, since = "canary-0009", time.time() + 20_000
    await talk(store, 0.1, ("promoted", since + 1), **{conventions.LLM_CANARY_FAILED: name})
    arms = await arms_since(store, name, since, None, step=since, version="7", most=3)
    assert (*facts(arms), arms.filled) == ([], [], 1, 1, None)
    await talk(store, 0.2, (name, since + 2))
    await talk(store, 0.3, ("promoted", since + 3), **{conventions.LLM_CANARY_FULL: f"{name}@7"})
    arms = await arms_since(store, name, since, None, step=since, version="7", most=3)
    assert facts(arms) == ([0.2], [], 2, 1), "what began when it was full counts for nothing"
    assert arms.filled == pytest.approx(since + 2), "although one that it took is not stored yet"
    later = await arms_since(store, name, since, None, step=since + 2.5, version="8", most=3)
    assert (later.begun, later.filled) == (0, None), "what a proxy says of the version before fills no step"
    await talk(store, 0.4, (name, since + 4))
    await talk(store, 0.5, (name, since + 5))
    arms = await arms_since(store, name, since, None, step=since, version="7", most=3)
    assert (*facts(arms), arms.filled) == ([0.2, 0.4, 0.5], [0.3], 4, 1, pytest.approx(since + 4)), "of prompts, which go on"

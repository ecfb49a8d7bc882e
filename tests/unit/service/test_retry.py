from __future__ import annotations

import pytest

from agl_otel.errors import DataError, UnavailableError
from agl_otel.service.retry import Backoff, Tries, retry


class World:
    """A clock that sleeping advances, and a service that is unavailable until `back`."""

    def __init__(self, back: float = float("inf")) -> None:
        self.now, self.back = 0.0, back
        self.asked: list[float] = []

    def clock(self) -> float:
        """The time."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Move the clock."""
        self.now += seconds

    async def ask(self) -> str:
        """Raises UnavailableError until the service is back."""
        self.asked.append(self.now)
        if self.now < self.back:
            raise UnavailableError(f"away at {self.now:g}")
        return "back"


EXACT = Backoff(1.0, 4.0, jitter=0.0)


def test_pauses_double_up_to_the_longest() -> None:
    assert [EXACT.seconds(failures) for failures in range(6)] == [0, 1, 2, 4, 4, 4]
    assert EXACT.seconds(100_000) == 4


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_jitter_is_the_random_share_of_a_pause(jitter: float) -> None:
    backoff = Backoff(1.0, 4.0, jitter=jitter)
    pauses = {backoff.jittered(3) for _ in range(100)}
    assert all(4 * (1 - jitter) <= pause <= 4 for pause in pauses)
    assert (len(pauses) > 1) == bool(jitter)


async def test_an_unavailable_service_is_retried_until_it_is_back() -> None:
    world = World(back=10)
    assert await retry(world.ask, EXACT, clock=world.clock, sleep=world.sleep) == "back"
    assert world.asked == [0, 1, 3, 7, 11]


async def test_no_try_begins_after_the_time_limit() -> None:
    world = World()
    with pytest.raises(UnavailableError, match="away at 7"):
        await retry(world.ask, EXACT, seconds=10, clock=world.clock, sleep=world.sleep)
    assert world.now == 7, "it does not wait for what it will not try"


async def test_tries_are_limited() -> None:
    world = World()
    with pytest.raises(UnavailableError):
        await retry(world.ask, EXACT, limit=3, clock=world.clock, sleep=world.sleep)
    assert world.asked == [0, 1, 3]


async def test_without_time_there_is_one_try() -> None:
    world = World()
    with pytest.raises(UnavailableError):
        await retry(world.ask, EXACT, seconds=0, clock=world.clock, sleep=world.sleep)
    assert world.asked == [0]


async def test_the_first_failure_is_reported_once_and_only_where_a_try_follows() -> None:
    reported: list[str] = []
    world = World(back=5)
    await retry(world.ask, EXACT, clock=world.clock, sleep=world.sleep, first_failure=lambda error: reported.append(str(error)))
    assert reported == ["away at 0"]
    with pytest.raises(UnavailableError):
        await retry(World().ask, EXACT, limit=1, first_failure=lambda error: reported.append(str(error)))
    assert reported == ["away at 0"]


async def test_other_errors_are_not_retried() -> None:
    asked: list[int] = []

    async def refuse() -> None:
        asked.append(1)
        raise DataError("malformed")

    with pytest.raises(DataError):
        await retry(refuse, EXACT)
    assert asked == [1]


def test_a_server_that_asks_for_a_longer_pause_gets_it_within_the_time() -> None:
    now = 0.0
    tries = Tries(EXACT, seconds=30, clock=lambda: now)
    assert tries.pause(at_least=20) == 20
    assert tries.pause(at_least=40) is None

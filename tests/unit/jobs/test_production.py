"""What the loop of `agl-otel improve` does while its stack is away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agl_otel.errors import DataError, UnavailableError
from agl_otel.jobs.production import AWAY_SECONDS, patiently


class Away:
    """Work that takes so many seconds of its own clock each time, and raises what it is given until nothing is left."""

    def __init__(self, *tries: tuple[float, Exception | None]) -> None:
        self.now = 0.0
        self.left: Iterator[tuple[float, Exception | None]] = iter(tries)
        self.told: list[str] = []

    async def __call__(self) -> str:
        seconds, error = next(self.left)
        self.now += seconds
        if error is not None:
            raise error
        return "done"

    async def result(self) -> str:
        return await patiently(self, lambda error: self.told.append(str(error)), clock=lambda: self.now)


@pytest.mark.parametrize("seconds", [AWAY_SECONDS + 1, 3600.0])
async def test_work_that_goes_well_for_long_has_its_whole_time_at_each_restart(seconds: float) -> None:
    restarts = [(seconds, UnavailableError(f"restart {number}")) for number in range(3)]
    away = Away(*restarts, (1.0, None))
    assert (await away.result(), away.told) == ("done", ["restart 0", "restart 1", "restart 2"])


async def test_a_stack_that_stays_away_is_told_of_once_and_raised_in_the_end() -> None:
    away = Away(*[(AWAY_SECONDS / 3, UnavailableError(f"try {number}")) for number in range(9)])
    with pytest.raises(UnavailableError, match="try 3"):
        await away.result()
    assert away.told == ["try 0"]


async def test_another_error_is_no_reason_to_wait() -> None:
    away = Away((0.0, UnavailableError("away")), (0.0, DataError("no data")))
    with pytest.raises(DataError):
        await away.result()

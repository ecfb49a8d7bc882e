"""Load balancing over the endpoints of one model: sticky choice by conversation, and health. Pure; the clock is injected.

A conversation (a rollout is one) keeps its endpoint, which has its prefix cached; rendezvous hashing moves only those of an endpoint
that is added or removed. An unreachable endpoint is skipped for a while, longer after each failure, and tried again. A canary is tried
as soon as it is published again: its server may be another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from agl_otel.proxy.upstream import Upstream
from agl_otel.service.retry import Backoff
from agl_otel.text import without_secrets

DOWN: Final = Backoff(1.0, 30.0, jitter=0.0)
"""How long an endpoint is skipped after failures."""
MAX_ENDPOINTS: Final = 10_000


class Health:
    """Health of endpoints, by base URL."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._down: dict[str, _Down] = {}
        """By base URL."""

    def failed(self, endpoint: Upstream) -> None:
        """Record that an endpoint was unreachable or answered that it cannot serve."""
        held = self._down.get(endpoint.base_url)
        failures = 1 if held is None or _is_published_again(endpoint, held) else held.failures + 1
        if len(self._down) < MAX_ENDPOINTS:
            self._down[endpoint.base_url] = _Down(self._clock() + DOWN.seconds(failures), failures, endpoint.version)

    def answered(self, base_url: str) -> None:
        """Record that an endpoint answered."""
        if self._down:
            self._down.pop(base_url, None)

    def is_up(self, endpoint: Upstream) -> bool:
        """Whether an endpoint may be called now."""
        held = self._down.get(endpoint.base_url)
        return held is None or held.until <= self._clock() or _is_published_again(endpoint, held)

    def down(self) -> list[str]:
        """The endpoints that are skipped now, without the passwords in their addresses."""
        now = self._clock()
        return [without_secrets(url) for url, held in self._down.items() if held.until > now]

    def order(self, endpoints: Sequence[Upstream], conversation: str | None) -> Sequence[Upstream]:
        """The endpoints in the order to try: canaries first, then the conversation's own, those that are down last."""
        if len(endpoints) == 1:
            return endpoints

        def place(each: Upstream) -> tuple[bool, bool, bytes]:
            return not self.is_up(each), not each.canary, _distance(conversation or "", each.base_url)

        return sorted(endpoints, key=place)


class _Down(NamedTuple):
    """An endpoint that has failed."""

    until: float
    """It is skipped."""
    failures: int
    """Consecutive ones."""
    version: str | None
    """Of the resources by which it failed last."""


def _is_published_again(endpoint: Upstream, held: _Down) -> bool:
    return endpoint.canary and endpoint.version != held.version


def _distance(conversation: str, base_url: str) -> bytes:
    return blake2b(f"{conversation} {base_url}".encode(), digest_size=8).digest()

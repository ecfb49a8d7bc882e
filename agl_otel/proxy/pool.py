"""Load balancing over the endpoints of one model: sticky choice by conversation, and health. Pure; the clock is injected.

A conversation (a rollout is one) keeps its endpoint, which has its prefix cached; rendezvous hashing moves only those of an endpoint
that is added or removed. An unreachable endpoint is skipped for a while, longer after each failure, and tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

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
        self._down: dict[str, tuple[float, int]] = {}
        """{base URL: (skipped until, consecutive failures)}."""

    def failed(self, base_url: str) -> None:
        """Record that an endpoint was unreachable or answered that it cannot serve."""
        _, failures = self._down.get(base_url, (0.0, 0))
        if len(self._down) < MAX_ENDPOINTS:
            self._down[base_url] = (self._clock() + DOWN.seconds(failures + 1), failures + 1)

    def answered(self, base_url: str) -> None:
        """Record that an endpoint answered."""
        if self._down:
            self._down.pop(base_url, None)

    def is_up(self, base_url: str) -> bool:
        """Whether an endpoint may be called now."""
        held = self._down.get(base_url)
        return held is None or held[0] <= self._clock()

    def down(self) -> list[str]:
        """The endpoints that are skipped now, without the passwords in their addresses."""
        return [without_secrets(url) for url in self._down if not self.is_up(url)]

    def order(self, endpoints: Sequence[Upstream], conversation: str | None) -> Sequence[Upstream]:
        """The endpoints in the order to try: canaries first, then the conversation's own, those that are down last."""
        if len(endpoints) == 1:
            return endpoints

        def place(each: Upstream) -> tuple[bool, bool, bytes]:
            return not self.is_up(each.base_url), not each.canary, _distance(conversation or "", each.base_url)

        return sorted(endpoints, key=place)


def _distance(conversation: str, base_url: str) -> bytes:
    return blake2b(f"{conversation} {base_url}".encode(), digest_size=8).digest()

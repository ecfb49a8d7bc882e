"""Report the ledgers of dead runners, once the processes of their attempts are gone, so that those attempts' spans are counted too."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from typing import Final

from agl_otel.queue.client import AttemptUpdate
from agl_otel.runner.completion import Completion, proxy_session, retry_unavailable
from agl_otel.runner.ledgers import Key, Ledgers, OrphanedLedger
from agl_otel.types import AttemptLedger

POLL_SECONDS: Final = 5.0  # between polls for ledgers of dead runners, after the start
FAST_POLLS: Final = 12  # number of those polls
SLOW_POLL_SECONDS: Final = 60.0  # between later polls
LAST_POLL_SECONDS: Final = 0.5  # while this runner waits for the processes of dead ones at its end
_log = logging.getLogger(__name__)


async def report_orphaned(ledgers: Ledgers, completion: Completion, ending: asyncio.Event, *, last_seconds: float) -> None:
    """Report orphaned ledgers again and again; once `ending` is set, until no process of theirs runs.

    Then the caller cancels this after `last_seconds`, which a warning names.
    """
    waits = False
    for poll in itertools.count(1):
        last, running = ending.is_set(), list[str]()
        try:
            if orphans := await asyncio.to_thread(ledgers.orphaned):
                running = await _report(ledgers, orphans, completion)
        except Exception:  # noqa: BLE001 - boundary: ledgers of other runners must never stop this one
            completion.counts["ledger_errors"] += 1
            _log.exception("ledgers of dead runners could not be reported")
        finally:
            ledgers.close()
        if last:
            if not running:
                return
            if not waits:
                _log.warning("waiting up to %g s for processes that a killed runner left of %s", last_seconds, ", ".join(running))
            waits = True
            await asyncio.sleep(LAST_POLL_SECONDS)
            continue
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS if poll < FAST_POLLS else SLOW_POLL_SECONDS):
                await ending.wait()


async def _report(ledgers: Ledgers, orphans: Sequence[OrphanedLedger], completion: Completion) -> list[str]:
    """Close the attempts that the queue knows at the proxies, and report their ledgers unless their runner has reported one.

    Return the attempts of which a process still runs.
    """
    queue = completion.queue
    attempts = await retry_unavailable(lambda: queue.query_attempts(sorted({each.rollout_id for each in orphans})))
    known = {(attempt.rollout_id, attempt.attempt_id): attempt.ledger is not None for attempt in attempts}
    found: dict[Key, AttemptLedger] = {}
    over: list[OrphanedLedger] = []
    running: list[str] = []
    for orphan in orphans:
        key = orphan.rollout_id, orphan.attempt_id
        if key not in known:
            continue
        if (ledger := await asyncio.to_thread(ledgers.read_orphaned, orphan)) is None:
            running.append(orphan.attempt_id)
            continue
        over.append(orphan)
        found |= {} if known[key] else {key: ledger}
    if found:
        async with proxy_session() as session:
            seals = await completion.close(session, [*found])
        updates = [AttemptUpdate(rollout_id=key[0], attempt_id=key[1], ledger=found[key], seals=seals.get(key, {})) for key in found]
        for update, error in zip(updates, await retry_unavailable(lambda: queue.report(updates)), strict=True):
            if error is not None:
                _log.warning("the queue refused the ledger of attempt %s: %s", update.attempt_id, error)
    for orphan in over:
        await asyncio.to_thread(ledgers.remove_orphaned, orphan)
    return running

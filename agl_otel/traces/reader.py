"""Reads the observations of rollouts, with a verdict for each attempt: the way in which algorithms read traces.

`traces` requests a barrier from the collectors, reads the rollouts in few queries, and decides on every attempt. queries.py has what is
stored without a verdict, observed.py derives what spans are, rows.py converts rows to types, facts.py counts to facts, tokens.py tokens
to columns.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, TypeVar

from agl_otel.errors import UnavailableError
from agl_otel.net.http_server import PROBE_SECONDS, is_healthy
from agl_otel.service.retry import retry
from agl_otel.spans.calls import UPSTREAM
from agl_otel.traces.collector_client import unanswered
from agl_otel.traces.facts import ReadFacts, attempt_facts
from agl_otel.traces.observed import with_derived
from agl_otel.traces.queries import TraceQueries, in_parts, params_of
from agl_otel.traces.rows import rewards_of, unread_labels
from agl_otel.traces.sql import named_query
from agl_otel.traces.tokens import (
    Table,
    call_columns,
    call_errors,
    call_texts,
    distinct_in_order,
    evaluations_of,
    reward_rows,
    rollouts_to_read,
    span_columns,
    with_evaluations,
    with_responses,
)
from agl_otel.traces.verdict import decide
from agl_otel.types import Attempt, AttemptedRollout, Rollout, Verdict
from agl_otel.types.columns import Traces

T = TypeVar("T")
ONCE_SECONDS: Final = 10.0  # bound of a barrier for a single read without a deadline
PINGS: Final = 2  # successive unanswered pings that mean down: a busy machine may miss one
ASK_AGAIN_SECONDS: Final = 0.2  # interval at which incomplete attempts are read again
UNREADABLE: Final = "its spans cannot be read, because they are more than one read may take"
SHOWN_LABELS: Final = 5
WARNED_LABELS: Final = 1_000
"""So many sets of labels are remembered as logged."""
_log = logging.getLogger(__name__)


class TraceReader(TraceQueries):
    """What TraceQueries reads, and traces with verdicts."""

    async def traces(
        self,
        rollouts: Sequence[Rollout | AttemptedRollout],
        attempts: Sequence[Attempt],
        *,
        barrier: bool = True,
        deadline_seconds: float = 5.0,
        texts: bool = False,
        tree: bool = False,
        evaluations: Collection[int] | None = None,
    ) -> Traces:
        """Read all observations of `rollouts`, with a verdict for each of `attempts`.

        Incomplete attempts are read again until `deadline_seconds` have passed, since their last spans may still arrive; collectors that
        do not answer are retried as long. If some never answer, spans that they acked may be missing: attempts that are not complete
        anyway then count as incomplete, and the reasons name those collectors. The calls' content is read with `texts`, else only for
        rollouts with a split trajectory or images; `tree`: return all spans with their parents, too; `evaluations`: of those that
        came as log records these alone (Traces.evaluations of an earlier read). Raises UnavailableError if ClickHouse
        does not answer by the deadline; a slow read is waited for while it answers pings. Many rollouts are read in parts
        (ROLLOUTS_PER_QUERY), a part that is too large for one read of ClickHouse in smaller ones; if a single rollout is too large, its
        attempts are incomplete.
        """
        ids = [rollout.rollout_id for rollout in rollouts]
        began = time.monotonic()
        deadline = began + deadline_seconds
        patience = deadline if deadline > began else began + ONCE_SECONDS
        while True:
            silent = await self._silent_collectors(patience, deadline) if barrier else {}
            table, facts, unread = await self._read_by(deadline, patience, lambda: self._observed(ids, evaluations))
            verdicts = _verdicts(facts, attempts, silent)
            late = (rollout_id for (rollout_id, _), verdict in verdicts.items() if verdict.kind == "incomplete")
            if time.monotonic() >= deadline or not any(rollout_id not in unread for rollout_id in late):
                break
            del table, facts  # else both reads would be in memory
            await asyncio.sleep(min(ASK_AGAIN_SECONDS, max(0.0, deadline - time.monotonic())))
        if silent:
            _log.warning("read without what these collectors acked last: %s", "; ".join(silent.values()))
        if alarms := [attempt_id for (_, attempt_id), verdict in verdicts.items() if verdict.alarm]:
            _log.warning(
                "%d of %d attempts are unproven though their agents ran under the hook, the first of them %s: their spans were not counted",
                len(alarms), len(verdicts), alarms[0],
            )  # fmt: skip
        rewarded = reward_rows(table)
        if labels := sum(unread_labels(rewarded).values(), Counter[str]()):
            _warn_of(frozenset(labels))
        calls = call_columns(table)
        read = [each for each in (ids if texts else rollouts_to_read(calls)) if each not in unread]
        contents = None
        if read:
            contents, failed = await self._read_by(deadline, patience, lambda: self._table("texts", read))
            unread |= failed
        if unread:
            verdicts |= {key: _unreadable(verdict, unread[key[0]]) for key, verdict in verdicts.items() if key[0] in unread}
            _log.warning("%d of %d rollouts are left out, the first of them %s: %s", len(unread), len(ids), *next(iter(unread.items())))
        failed_in = {rollout for rollout, why in zip(calls.rollout_id, calls.incomplete, strict=True) if why.startswith(UPSTREAM)}
        errors = Counter[str]()
        if failed_in:
            errors = call_errors((await self._read_by(deadline, patience, lambda: self._table("call_errors", list(failed_in))))[0])
        return Traces(
            rollouts=list(rollouts),
            calls=calls,
            call_errors=errors,
            rewards=with_responses(rewards_of(rewarded), table),
            verdicts=verdicts,
            texts=call_texts(contents, calls) if read else None,
            tree=span_columns(table) if tree else None,
            spans=facts.spans,
            highest_sequence=facts.highest_sequence,
            digest=facts.digest,
            evaluations=evaluations_of(table),
        )

    async def _silent_collectors(self, until: float, deadline: float) -> dict[str, str]:
        """Return {collector: reason} of those that do not answer a barrier by `until`.

        Raises UnavailableError if ClickHouse, which may be reached through a collector, does not answer by `deadline` either.
        """
        unanswered_pings = 0
        while True:
            await self._look_up()
            asked = unanswered(self._http.session, self.collectors, seconds=max(until - time.monotonic(), ASK_AGAIN_SECONDS))
            silent, answers = await asyncio.gather(asked, self._find_endpoint())
            if silent and await self._look_up():
                silent = await unanswered(self._http.session, self.collectors, seconds=max(until - time.monotonic(), ASK_AGAIN_SECONDS))
                answers = await self._find_endpoint()
            if not silent or answers:
                return silent
            unanswered_pings += 1
            if unanswered_pings >= PINGS and time.monotonic() >= deadline:
                raise UnavailableError(f"ClickHouse does not answer at {self._http.url}: {'; '.join(silent.values())}")
            await asyncio.sleep(ASK_AGAIN_SECONDS)

    async def _find_endpoint(self) -> bool:
        """Whether ClickHouse answers at the current address or at another of the endpoints, which is used from then on."""
        for url in dict.fromkeys((self._http.url, *self._endpoints)):
            if await is_healthy(f"{url}/ping", self._http.session):
                self._http.url = url
                return True
        return False

    async def _read_by(self, deadline: float, patience: float, read: Callable[[], Awaitable[T]]) -> T:
        """Await a read as `_await_read` does, and try again until `deadline` where ClickHouse is away, as while it restarts."""

        async def read_here() -> T:
            try:
                return await self._await_read(read, patience)
            except UnavailableError:
                if time.monotonic() < deadline:
                    await self._find_endpoint()
                raise

        return await retry(read_here, seconds=deadline - time.monotonic())

    async def _await_read(self, read: Callable[[], Awaitable[T]], until: float) -> T:
        """Await a read. Raises UnavailableError if it is not done by `until` and pings are not answered."""
        task, url, unanswered_pings = asyncio.ensure_future(read()), self._http.url, 0
        try:
            await asyncio.wait({task}, timeout=max(until - PINGS * PROBE_SECONDS - time.monotonic(), 0.0))
            while not task.done():
                unanswered_pings = 0 if await self._find_endpoint() else unanswered_pings + 1
                if self._http.url != url and not task.done():
                    task.cancel()
                    task, url = asyncio.ensure_future(read()), self._http.url
                if unanswered_pings >= PINGS and time.monotonic() >= until and not task.done():
                    raise UnavailableError(f"ClickHouse does not answer at {self._http.url}")
                await asyncio.wait({task}, timeout=ASK_AGAIN_SECONDS)
            return task.result()
        finally:
            task.cancel()
            del task  # else its error, which refers to this frame, would keep what it has read

    async def _observed(self, ids: Sequence[str], evaluations: Collection[int] | None) -> tuple[Table, ReadFacts, dict[str, str]]:
        """Return what is stored of these rollouts, and {rollout id: why it cannot be read}."""
        table, unread = await self._table("traces", ids)
        table = distinct_in_order(with_derived(table))
        table = table if evaluations is None else with_evaluations(table, evaluations)
        return table, ReadFacts.of(table), unread

    async def _table(self, name: str, ids: Sequence[str]) -> tuple[Table, dict[str, str]]:
        """Return the rows of a named query, and {rollout id: why it cannot be read}."""

        async def read(some: Sequence[str]) -> Table:
            return await self.arrow(named_query(name), params=params_of(name, some))

        tables, errors = await in_parts(read, ids)
        unread = {rollout_id: f"{UNREADABLE}: {error}" for rollout_id, error in errors.items()}
        if len(tables) == 1:
            return tables[0], unread
        import pyarrow as pa

        return pa.concat_tables(tables or [await read([])]), unread


def _verdicts(facts: ReadFacts, attempts: Sequence[Attempt], silent: Mapping[str, str]) -> dict[tuple[str, str], Verdict]:
    """Decide on each attempt; `silent` is {collector that did not answer: reason}."""
    decided = {(a.rollout_id, a.attempt_id): decide(attempt_facts(facts, a)) for a in attempts}
    if not silent:
        return decided
    why = [f"what its last spans are is not known: {reason}" for reason in silent.values()]
    return {
        key: verdict if verdict.kind == "complete" else verdict.model_copy(update={"kind": "incomplete", "reasons": verdict.reasons + why})
        for key, verdict in decided.items()
    }


@functools.lru_cache(WARNED_LABELS)
def _warn_of(labels: frozenset[str]) -> None:
    """Log labels of evaluations that count for nothing, once for each set of them; the figures of an attempt count them."""
    _log.warning(
        "evaluations without a score have labels that are no number, and are no rewards: %s; `pass`, `fail` and others count "
        "(docs/otlp.md#evaluations)",
        ", ".join(map(repr, sorted(labels)[:SHOWN_LABELS])),
    )


def _unreadable(verdict: Verdict, why: str) -> Verdict:
    return verdict.model_copy(update={"kind": "incomplete", "reasons": [why]})

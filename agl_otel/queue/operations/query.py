"""Queries: filters and pages over rollouts, attempts, resources and workers; runs; statistics."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple

from agl_otel.queue.convert import attempt_fields, resources_pb, rollouts_pb, worker_pb
from agl_otel.queue.engine import Transaction
from agl_otel.queue.operations.checks import ROLLOUT_STATUSES
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import AttemptRow, ResourcesRow, WorkerRow
from agl_otel.queue.statements import page_clause
from agl_otel.queue.transitions import ATTEMPTS, CLAIMABLE, ROLLOUTS

SEARCHED_INPUTS: Final = 100_000
"""How many of the latest rollouts a search in inputs reads."""
_ROLLOUT_SORT: Final = {
    name: f"r.{name}"
    for name in (
        "rollout_id",
        "status",
        "mode",
        "priority",
        "not_before",
        "start_time",
        "end_time",
        "resources_id",
        "resources_version",
        "reason",
    )
}
_ATTEMPT_SORT: Final = {
    name: f"a.{name}"
    for name in ("rollout_id", "attempt_id", "sequence_id", "status", "start_time", "end_time", "worker_id", "last_heartbeat_time")
}
_LISTS: Final = {"rollout": ("status_in", "mode_in"), "worker": ("status_in",), "resources": ()}
_RESOURCES_SORT: Final = {name: f"s.{name}" for name in ("resources_id", "version", "create_time", "update_time")}
_WORKER_SORT: Final = {f"{name}": f"w.{name}" for name in WorkerRow._fields if name != "heartbeat_stats"}


def _page(page: pb.Page, sortable: dict[str, str], default: str, *, nulls: bool = True) -> str:
    return page_clause(
        page.sort_by, sortable, default=default, descending=page.descending, limit=page.limit, offset=page.offset, nulls=nulls
    )


def _conditions(kind: str, asked: pb.Filter) -> tuple[list[str], dict[str, Any]]:
    """Return the names of a filter's SQL fragments, and their parameters."""
    where: list[str] = []
    params: dict[str, Any] = {}
    for name in _LISTS[kind]:
        values = list(getattr(asked, name))
        if (kind, name) == ("rollout", "status_in") and len(values) == 1 and values[0] in ROLLOUT_STATUSES:
            where.append(f"where_rollout_{values[0]}")
        elif values:
            where.append(f"where_{kind}_{name}")
            params[name] = json.dumps(values)
    if asked.has_id_in:
        where.append(f"where_{kind}_id_in")
        params["id_in"] = json.dumps(list(asked.id_in))
    if asked.HasField("id_contains"):
        where.append(f"where_{kind}_id_contains")
        params["id_contains"] = asked.id_contains
    if asked.HasField("run"):
        where.append("where_rollout_run")
        params["run"] = asked.run
    if asked.HasField("input_contains"):
        where.append("where_rollout_input_contains")
        text = asked.input_contains
        params |= {"input_contains": text, "input_escaped": json.dumps(text)[1:-1], "searched": SEARCHED_INPUTS}
    if asked.attempts_from > 0:
        where.append("where_rollout_attempts_from")
        params["attempts_from"] = asked.attempts_from
    return where, params


def _total(tx: Transaction, name: str, where: list[str], params: dict[str, Any], page: pb.Page, found: int, **options: Any) -> int:
    if not _is_cut(page):
        return found
    return int(tx.rows_of(tx.statements.paged(name, where, **options), params)[0][0])


def _is_cut(page: pb.Page) -> bool:
    """Whether there may be matches outside the page."""
    return page.limit > 0 or page.offset > 0


def query_rollouts(tx: Transaction, request: pb.QueryRolloutsRequest) -> pb.Rollouts:
    """Query rollouts with their latest attempts, in the order of their creation unless `sort_by` names a field."""
    where, params = _conditions("rollout", request.filter)
    dead = _is_dead(request)
    named = request.filter.has_id_in and not request.filter.any
    order = "r.ordinal + 0" if named else "r.ordinal"  # sort the few rows: for the bare column PostgreSQL would walk all
    page = _page(request.page, _ROLLOUT_SORT, order, nulls=not dead)
    options: dict[str, Any] = {"any_of": request.filter.any}
    if request.filter.HasField("ended_before"):
        options["always"] = ["where_rollout_ended_before"]
        params["ended_before"] = request.filter.ended_before
    chosen_first = request.page.offset > 0 or (bool(request.page.sort_by) and _is_cut(request.page))  # skipped rows are not joined
    query = "rollouts_page_dead" if dead else "rollouts_page_sorted" if chosen_first else "rollouts_page"
    rows = tx.rows_of(tx.statements.paged(query, where, page, **options), params)
    if _is_tallied(request.filter) and _is_cut(request.page):
        total = matching(all_tallies(tx), request.filter.status_in, request.filter.mode_in)
    else:
        total = _total(tx, "rollouts_total", where, params, request.page, len(rows), **options)
    answer = rollouts_pb(rows)
    answer.total = total
    answer.filters.extend(field.name for field, _ in request.filter.ListFields())
    return answer


def _is_dead(request: pb.QueryRolloutsRequest) -> bool:
    """Whether it asks for a page of dead letters (failed rollouts) by end time; those all have one."""
    asked = request.filter
    others = _is_searched(asked) or (asked.any and bool(asked.mode_in))
    return list(asked.status_in) == ["failed"] and request.page.sort_by == "end_time" and _is_cut(request.page) and not others


def _is_tallied(asked: pb.Filter) -> bool:
    """Whether the counters give the number of matches, so that no rows need counting."""
    either = asked.any and bool(asked.status_in) and bool(asked.mode_in)
    return not (either or _is_searched(asked) or asked.HasField("ended_before"))


def _is_searched(asked: pb.Filter) -> bool:
    """Whether it filters by more than status, mode and time."""
    return asked.has_id_in or asked.attempts_from > 0 or any(asked.HasField(name) for name in ("id_contains", "run", "input_contains"))


def query_attempts(tx: Transaction, request: pb.QueryAttemptsRequest) -> pb.Attempts:
    """Query the attempts of these rollouts, ordered by number unless `sort_by` names a field; unknown rollouts have none."""
    where = ["where_attempt_latest" if request.latest_only else "where_attempt_rollout_in"]
    params = {"rollout_ids": json.dumps(list(request.rollout_ids))}
    default = "a.sequence_id" if len(request.rollout_ids) == 1 else "a.rollout_id, a.sequence_id"
    rows = tx.rows_of(tx.statements.paged("attempts_page", where, _page(request.page, _ATTEMPT_SORT, default)), params)
    total = _total(tx, "attempts_total", where, params, request.page, len(rows))
    answer = pb.Attempts(total=total)
    for row in rows:
        answer.attempts.add(**attempt_fields(AttemptRow._make(row)))
    return answer


def query_resources(tx: Transaction, request: pb.QueryResourcesRequest) -> pb.ResourcesList:
    """Query the current versions of sets of resources; or all versions, one version, or only the set written last."""
    if request.latest_only:
        rows = tx.rows("resources_latest")
        total = len(rows)
    elif request.HasField("version") and request.filter.id_in:
        rows = tx.rows("resources_version", {"resources_id": request.filter.id_in[0], "version": request.version})
        total = len(rows)
    else:
        where, params = _conditions("resources", request.filter)
        options: dict[str, Any] = {"any_of": request.filter.any, "always": [] if request.all_versions else ["where_resources_current"]}
        page = _page(request.page, _RESOURCES_SORT, "s.ordinal")
        rows = tx.rows_of(tx.statements.paged("resources_page", where, page, **options), params)
        total = _total(tx, "resources_total", where, params, request.page, len(rows), **options)
    return pb.ResourcesList(resources=[resources_pb(ResourcesRow._make(row)) for row in rows], total=total)


def query_workers(tx: Transaction, request: pb.QueryWorkersRequest) -> pb.Workers:
    """Query workers, ordered by id unless `sort_by` names a field."""
    where, params = _conditions("worker", request.filter)
    options: dict[str, Any] = {"any_of": request.filter.any}
    page = _page(request.page, _WORKER_SORT, "w.worker_id")
    rows = tx.rows_of(tx.statements.paged("workers_page", where, page, **options), params)
    total = _total(tx, "workers_total", where, params, request.page, len(rows), **options)
    return pb.Workers(workers=[worker_pb(WorkerRow._make(row)) for row in rows], total=total)


# --- runs


def query_runs(tx: Transaction, request: pb.QueryRunsRequest) -> pb.Runs:
    """Count the rollouts of each run, or of `request.run`, by status and mode. Runs without rollouts are left out."""
    of_run: dict[str, list[_Part]] = {}
    for row in tx.rows("runs_parts", {"run": _asked(request)}):
        part = _Part._make(row)
        of_run.setdefault(part.run, []).append(part)
    answer = pb.Runs()
    for parts in of_run.values():
        present = [part for part in parts if part.rollouts]
        first_start = min(part.first_start for part in parts)
        last_end = max((part.last_end for part in parts if part.last_end is not None), default=None)
        last_step = max((part.last_step for part in parts if part.last_step is not None), default=None)
        for part in present:
            answer.parts.add(**part._replace(first_start=first_start, last_end=last_end, last_step=last_step)._asdict())
    return answer


def query_run_members(tx: Transaction, request: pb.QueryRunsRequest) -> pb.RunMembers:
    """Return the rollouts of one run as columns."""
    rows = tx.rows("run_members", {"run": _asked(request)})
    ids, steps, statuses, modes = zip(*rows, strict=True) if rows else ((), (), (), ())
    return pb.RunMembers(rollout_ids=ids, steps=steps, statuses=statuses, modes=modes)


class _Part(NamedTuple):
    """A row of `runs_parts`; pb.RunPart on the wire."""

    run: str
    status: str
    mode: str
    rollouts: int
    attempts: int
    first_start: float
    last_end: float | None
    last_step: int | None


def _asked(request: pb.QueryRunsRequest) -> str | None:
    return request.run if request.HasField("run") else None


# --- counters


def statistics(tx: Transaction, now: float) -> pb.StatisticsResponse:
    """Return the counts of rollouts, attempts, resources and workers, and the age of the oldest claimable rollout."""
    tallies = all_tallies(tx)
    by_status = rollouts_by_status(tallies)
    oldest = tx.rows("claimable_oldest")[0][0]
    return pb.StatisticsResponse(
        rollouts_by_status=by_status,
        total_rollouts=sum(by_status.values()),
        total_attempts=tallies.get(ATTEMPTS, 0),
        total_resources=tx.rows("resources_count")[0][0],
        total_workers=tx.rows("workers_count")[0][0],
        claimable=tallies.get(CLAIMABLE, 0),
        oldest_claimable_age_seconds=None if oldest is None else max(0.0, now - oldest),
    )


def all_tallies(tx: Transaction) -> dict[str, int]:
    """Return all counters by name; those at 0 may be missing."""
    return {name: int(count) for name, count in tx.rows("tallies_all")}


def rollouts_by_status(tallies: dict[str, int]) -> dict[str, int]:
    """Return {status: number of rollouts}, without zeros."""
    counted: dict[str, int] = {}
    for status, _, count in _split(tallies.items()):
        counted[status] = counted.get(status, 0) + count
    return {status: count for status, count in counted.items() if count}


def matching(tallies: dict[str, int], statuses: Collection[str], modes: Collection[str]) -> int:
    """Count the rollouts with one of these statuses and one of these modes; empty means any."""
    return sum(
        count for status, mode, count in _split(tallies.items()) if (not statuses or status in statuses) and (not modes or mode in modes)
    )


def _split(tallies: Iterable[tuple[str, int]]) -> Iterable[tuple[str, str, int]]:
    for name, count in tallies:
        if name.startswith(ROLLOUTS):
            _, status, mode = name.split("/")
            yield status, mode, count

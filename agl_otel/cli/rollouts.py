"""`agl-otel rollouts`: list, look at, wait for, cancel, retry, delete and enqueue rollouts."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, get_args

import click
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.output import brief, clock, lasted, lines_of, moment, open_console, table_of
from agl_otel.cli.queue import (
    BOTH_STORES,
    CHUNK,
    keep_spans_option,
    must_exist,
    not_in_queue,
    open_queue,
    progress,
    prune,
    rollout_ids_of,
    rollouts_named_by,
    wait_option,
)
from agl_otel.cli.verdicts import VERDICT_STYLES, verdict_lines
from agl_otel.errors import AglError, NotFoundError, UsageError
from agl_otel.queue.client import QueueClient, RolloutUpdate
from agl_otel.queue.lifecycle import FINISHED, OPEN
from agl_otel.stack.sharing import must_have_data, open_store
from agl_otel.stack.supervisor import running_address
from agl_otel.text import printable
from agl_otel.types import (
    ADOPTED,
    NOT_RUN,
    UNRESPONSIVE_SECONDS,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutQuery,
    RolloutStatus,
    Verdict,
    check_id,
    parse_labels,
)
from agl_otel.types.options import Finite, RunMode, Whole
from agl_otel.types.strict import strict_json, why_no_json

if TYPE_CHECKING:
    from agl_otel.store import Store
    from agl_otel.traces.figures import AttemptFigures
    from agl_otel.types.feedback import StoredEvaluation

SHOWN_RESOURCES: Final = 10
SHOWN_ROLLOUTS: Final = 5
WIDE: Final = 140  # columns of a terminal in which all of a rollout's fit
FIELDS: Final = frozenset(EnqueueRolloutRequest.model_fields)
Statuses = tuple[RolloutStatus, ...]
Modes = tuple[RolloutMode, ...]


class _Rollouts(click.Group):
    """A group whose default command is `ls`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["ls", *args]
        return super().parse_args(ctx, args)


def selection(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments that select rollouts: ids, or filters."""
    for decorate in (
        click.option("--mode", "modes", multiple=True, type=click.Choice(get_args(RolloutMode)), help="Only these modes (repeatable)."),
        click.option("--status", "statuses", multiple=True, type=click.Choice(get_args(RolloutStatus)), help="Only these (repeatable)."),
        click.argument("rollout_ids", nargs=-1),
        json_option,
        store_option,
        data_dir_option,
    ):
        command = decorate(command)
    return command


@click.group(cls=_Rollouts)
def rollouts() -> None:
    """List rollouts and work on them. Without a command: list them."""


rollouts.add_command(prune)


@rollouts.command("ls")
@data_dir_option
@store_option
@click.option("--status", "status_in", multiple=True, type=click.Choice(get_args(RolloutStatus)), help="Only these statuses (repeatable).")
@click.option("--mode", "mode_in", multiple=True, type=click.Choice(get_args(RolloutMode)), help="Only these modes (repeatable).")
@click.option("--run", help="Only of this run: a rollout's `metadata.run`, else its set of resources.")
@click.option("--input", "input_contains", metavar="TEXT", help="Only those with this text in their input, of the latest 100,000.")
@click.option(
    "--output",
    "replied",
    metavar="TEXT",
    help="Only those with this text in the model's last reply, of the latest 500 that match otherwise.",
)
@click.option("--attempts", type=Whole(0), default=0, metavar="N", help="Only those with at least N attempts.")
@click.option("--limit", type=Whole(0), default=20, show_default=True)
@json_option
def list_(data_dir: Path | None, store: str | None, as_json: bool, limit: int, attempts: int, replied: str | None, **chosen: Any) -> None:
    """List rollouts, the newest first: with when each was queued, and how long its latest attempt took from start to end.

    In JSON, `start_time` is when it was queued and `end_time` its end; `attempt` has the `start_time` and `end_time` of the attempt.
    """
    query: dict[str, Any] = {name: value or None for name, value in chosen.items()}
    query |= {"attempts_from": attempts, "sort_order": "desc", "limit": limit}

    settings = settings_for(data_dir, store)

    async def main() -> None:
        page: PaginatedResult[Rollout] | PaginatedResult[Rollout | AttemptedRollout]
        figures: dict[str, AttemptFigures] = {}
        problem = ""
        must_have_data(settings)
        if not replied and (as_json or running_address(settings)):  # the queue alone, unless there is more to read
            async with open_queue(data_dir, store) as queue:
                page = await queue.query_rollouts(**query)
                if not as_json and (ended := _ended(page)):
                    from agl_otel.store import Store

                    async with await Store.connect(queue.address, token=settings.token.get_secret_value()) as opened:
                        figures, problem = await _figures_of(opened, ended)
        else:
            setup_logging(settings.log_level if settings.log_level == "DEBUG" else "WARNING")
            async with open_store(settings) as opened:
                page = await opened.rollouts(RolloutQuery(output_contains=replied, **query))
                figures, problem = ({}, "") if as_json else await _figures_of(opened, _ended(page))
        if not as_json:
            _print_list(page, figures, problem)
            return
        cut = {} if page.searched is None else {"searched": page.searched}
        print_json({"total": page.total, **cut, "items": [_dumped(item) for item in page]})

    run_async(main)


def _ended(page: Sequence[Rollout]) -> list[Attempt]:
    return [item.attempt for item in page if isinstance(item, AttemptedRollout) and item.end_time]


async def _figures_of(opened: Store, attempts: Sequence[Attempt]) -> tuple[dict[str, AttemptFigures], str]:
    """Return {rollout: figures of its attempt}, or why they cannot be read: the queue's part is shown all the same."""
    try:
        return {each.rollout_id: each for each in await opened.reader.figures(list(attempts))}, ""
    except AglError as error:
        return {}, str(error)


def _print_list(page: PaginatedResult[Rollout], figures: Mapping[str, AttemptFigures], problem: str) -> None:
    """Print a line for each rollout: in a terminal the input is cut to what is left of it, and columns that do not fit are left out."""
    console = open_console(highlight=False)
    among = "" if page.searched is None else f", found among the latest {page.searched}"
    wide = console.width >= WIDE
    columns = ("rollout", "status", "verdict", "reward", "input", *(("mode", "attempt", "queued", "took") if wide else ()))
    rows = [_row(item, figures.get(item.rollout_id))[: len(columns)] for item in page]
    console.print(lines_of(f"{len(page)} of {page.total:,} rollouts{among}", columns, rows, cut="input", width=console.width))
    if problem:
        console.print(Text(f"verdicts and rewards could not be read: {printable(problem)}", "yellow"), soft_wrap=True)


def _dumped(item: Rollout) -> dict[str, Any]:
    return item.model_dump(mode="json", exclude={"token"})


def _row(item: Rollout, seen: AttemptFigures | None) -> tuple[object, ...]:
    attempt = item.attempt if isinstance(item, AttemptedRollout) else None
    name, end = (attempt.attempt_id, attempt.end_time or item.end_time) if attempt else (None, None)  # a lost one ends with its rollout
    verdict = seen.verdict.kind if seen and item.end_time else None
    reward = f"{seen.reward:.4g}" if seen and seen.reward is not None else None
    took = lasted(end - attempt.start_time) if attempt and end else None
    return item.rollout_id, item.status, verdict, reward, brief(item.input), item.mode, name, clock(item.start_time), took


@rollouts.command()
@click.argument("rollout_id")
@data_dir_option
@store_option
@json_option
def show(rollout_id: str, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Show one rollout and its attempts: status, verdict and reasons, feedback, the full error, and the agent's output.

    `agl-otel traces show` shows its spans. ROLLOUT_ID may be shortened to any part that only one rollout has, or be the id of a trace or
    conversation.
    """
    settings = settings_for(data_dir, store)
    setup_logging(settings.log_level if settings.log_level == "DEBUG" else "WARNING")

    async def main() -> None:
        async with open_store(settings) as opened:
            item = await one_rollout(opened, rollout_id)
            attempts = await opened.queue.query_attempts([item.rollout_id])
            seen = await _read_details(opened, item, attempts)
        if as_json:
            verdicts = {attempt_id: verdict.model_dump(mode="json") for attempt_id, verdict in seen.verdicts.items()}
            output = [{"attempt_id": key[0], "stream": key[1], "text": text} for key, text in seen.printed.items()]
            shown = {"rollout": _dumped(item), "attempts": [attempt.model_dump(mode="json") for attempt in attempts]}
            given = [each.model_dump(mode="json") for each in seen.evaluations]
            print_json(
                {**shown, "verdicts": verdicts, "output": output, "feedback": given} | ({"unseen": seen.problem} if seen.problem else {})
            )
            return
        console = open_console(highlight=False)
        fields = {name: value for name, value in _dumped(item).items() if value is not None and name != "attempt"}
        fields |= {name: moment(fields[name]) for name in ("start_time", "end_time", "not_before") if name in fields}
        fields = {"queued" if name == "start_time" else name: value for name, value in fields.items()}
        console.print(table_of(item.rollout_id, ("field", "value"), [(name, _text(value)) for name, value in fields.items()]))
        if seen.problem:
            console.print(Text(f"verdicts and output could not be read: {printable(seen.problem)}", "yellow"))
        for attempt in attempts:
            _print_attempt(console, attempt, seen)

    run_async(main)


@dataclass(frozen=True)
class _Details:
    """Verdicts, output and feedback of a rollout's attempts, from the trace store."""

    verdicts: dict[str, Verdict] = field(default_factory=dict[str, Verdict])
    figures: dict[str, AttemptFigures] = field(default_factory=dict[str, "AttemptFigures"])
    printed: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    evaluations: Sequence[StoredEvaluation] = ()
    problem: str = ""


async def _read_details(opened: Store, item: Rollout, attempts: Sequence[Attempt]) -> _Details:
    """Read verdicts, output and feedback of ended attempts. Why they cannot be read is reported: the queue's part is shown all the same."""
    try:
        traces = await opened.traces([item], deadline_seconds=0)
        printed = await opened.reader.printed(item.rollout_id)
        figures = {each.attempt_id: each for each in await opened.reader.figures(list(attempts))}
        evaluations = await opened.evaluations(item.rollout_id)
    except AglError as error:
        return _Details(problem=str(error))
    over = {attempt.attempt_id for attempt in attempts if attempt.status not in OPEN or item.status in FINISHED}
    return _Details({key[1]: verdict for key, verdict in traces.verdicts.items() if key[1] in over}, figures, printed, evaluations)


def _print_attempt(console: Console, attempt: Attempt, seen: _Details) -> None:
    verdict = seen.verdicts.get(attempt.attempt_id)
    head = Text.assemble(("attempt ", "dim"), f"{attempt.sequence_id}  {attempt.attempt_id}  {attempt.status}")
    if verdict:
        head.append("  verdict ", "dim").append(verdict.kind, VERDICT_STYLES[verdict.kind])
    figures = seen.figures.get(attempt.attempt_id)
    notes = [*(f"conversation {each}" for each in figures.conversation_ids), *figures.notes] if figures else []
    said = [Text(f"  {printable(each)}", "dim") for each in notes]
    for line in (head, Text(f"  {_times(attempt)}", "dim"), *(verdict_lines(verdict) if verdict else ()), *said):
        console.print(line)
    if seen.evaluations:
        from agl_otel.cli.render import feedback_lines  # numpy, which a list of rollouts does not need

        for line in feedback_lines(seen.evaluations, attempt.attempt_id):
            console.print(line, soft_wrap=True)
    printed = {stream: text for (attempt_id, stream), text in seen.printed.items() if attempt_id == attempt.attempt_id}
    for title, text in {"error": attempt.error, **printed}.items():
        if text:
            console.print(Text(f"  {title}:", "dim"))
            for line in text.rstrip("\n").split("\n"):
                console.print(Text(f"    {printable(line)}", "red" if title == "error" else ""), soft_wrap=True)


def _times(attempt: Attempt) -> str:
    times = {"started": attempt.start_time, "ended": attempt.end_time, "last heartbeat": attempt.last_heartbeat_time}
    parts = [f"{what} {clock(moment)}" for what, moment in times.items() if moment is not None]
    took = [f"took {lasted(attempt.end_time - attempt.start_time)}"] if attempt.end_time else []
    return ", ".join([*([f"worker {attempt.worker_id}"] if attempt.worker_id else []), *parts, *took])


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def one_rollout(store: Store, part: str) -> Rollout:
    """Return the rollout with this id, the only one whose id contains it, or that of this trace or conversation. Raises NotFoundError."""
    queue = store.queue
    page = await queue.query_rollouts(rollout_id_in=[part]) or await queue.query_rollouts(rollout_id_contains=part, limit=2)
    if not page:
        _, ids = await rollouts_named_by(part, store.reader)
        page = await queue.query_rollouts(rollout_id_in=ids) if len(ids) == 1 else page
    if not page:
        raise await not_in_queue(part, store.reader)
    if len(page) != 1:
        raise NotFoundError(f"{page.total} rollouts have {part!r} in their id: write more of it. `agl-otel rollouts ls` lists them")
    return page[0]


@rollouts.command()
@selection
@click.option("--timeout", type=Finite(min=0), metavar="SECONDS", help="Wait no longer.  [default: for ever]")
@click.pass_context
def wait(
    ctx: click.Context,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
    rollout_ids: tuple[str, ...],
    statuses: Statuses,
    modes: Modes,
    timeout: float | None,
) -> None:
    """Wait until rollouts have ended: those named, those of a status or mode, or all that are open now.

    The exit code is 0 if all succeeded, else 1.
    """

    async def main() -> bool:
        async with open_queue(data_dir, store) as queue:
            ids = await _selected(queue, rollout_ids, statuses or _open(), modes)
            ended: dict[str, str] = {}
            with progress(silent=as_json) as bar:
                task = bar.add_task("waiting", total=len(ids))
                async for some in queue.wait(ids, timeout_seconds=timeout):
                    ended |= {item.rollout_id: item.status for item in some}
                    bar.update(task, completed=len(ended))
        still_open = [name for name in ids if name not in ended]
        counts = {status: [*ended.values()].count(status) for status in sorted({*ended.values()})}
        if as_json:
            print_json({"ended": ended, "open": still_open})
        else:
            click.echo(", ".join([*(f"{count} {status}" for status, count in counts.items()), f"{len(still_open)} still open"]))
        return not still_open and set(counts) <= {"succeeded"}

    if not run_async(main):
        ctx.exit(1)


def _open() -> Statuses:
    return tuple(status for status in get_args(RolloutStatus) if status not in FINISHED)


async def _selected(queue: QueueClient, ids: Sequence[str], statuses: Statuses, modes: Modes) -> list[str]:
    """Return the given ids; without any, those that the filters match. Raises NotFoundError for an unknown id."""
    return await must_exist(queue, ids) if ids else await rollout_ids_of(queue, statuses, modes)


def _change(
    what: str,
    status: RolloutStatus,
    only: Statuses,
    *,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
    rollout_ids: tuple[str, ...],
    statuses: Statuses,
    modes: Modes,
) -> None:
    """Set this status on the selected rollouts whose status is one of `only`, CHUNK per call; name those that are left as they are."""
    _check_named(rollout_ids, statuses, modes)
    left: dict[str, str] = {}

    async def main() -> None:
        async with open_queue(data_dir, store) as queue:

            async def change(ids: list[str]) -> int:
                found = await queue.query_rollouts(rollout_id_in=ids)
                left.update({item.rollout_id: item.status for item in found if item.status not in only})
                updates = [RolloutUpdate(rollout_id=item.rollout_id, status=status) for item in found if item.status in only]
                return len(await queue.update_rollouts(updates)) if updates else 0

            ids = await _selected(queue, rollout_ids, statuses or only, modes)
            await _in_chunks(what, ids, change, as_json=as_json, left=left)

    run_async(main)
    if left and not as_json:
        names = ", ".join(f"{rollout_id} ({was})" for rollout_id, was in [*left.items()][:SHOWN_ROLLOUTS])
        more = f" and {len(left) - SHOWN_ROLLOUTS} more" if len(left) > SHOWN_ROLLOUTS else ""
        click.echo(f"left as it is: {names}{more}: only rollouts that are {', '.join(only)} can be {what}", err=True)


def _check_named(rollout_ids: Sequence[str], statuses: Statuses, modes: Modes) -> None:
    if not (rollout_ids or statuses or modes):
        raise UsageError("select rollouts by their ids, --status or --mode")


async def _in_chunks(
    what: str, ids: Sequence[str], change: Callable[[list[str]], Awaitable[int]], *, as_json: bool, left: Mapping[str, str] | None = None
) -> None:
    """Call `change` for CHUNK ids at a time; print how many it changed, and then `left`: {id: status} of unchanged ones."""
    done = 0
    with progress(silent=as_json) as bar:
        task = bar.add_task(what, total=len(ids))
        for start in range(0, len(ids), CHUNK):
            done += await change([*ids[start : start + CHUNK]])
            bar.update(task, completed=start + CHUNK)
    if as_json:
        print_json({what: done, **({"left": left} if left else {})})
    else:
        click.echo(f"{what} {done} rollouts")


@rollouts.command()
@selection
def cancel(**selected: Any) -> None:
    """Cancel rollouts that have not ended; a running agent is stopped at its runner's next heartbeat."""
    _change("cancelled", "cancelled", _open(), **selected)


@rollouts.command()
@selection
def retry(**selected: Any) -> None:
    """Put rollouts that failed or were cancelled back into the queue, for one more attempt each."""
    _change("requeued", "requeuing", ("failed", "cancelled"), **selected)


@rollouts.command()
@selection
@click.option("--yes", is_flag=True, help="Do not ask.")
@keep_spans_option
@wait_option
def delete(
    yes: bool,
    keep_spans: bool,
    wait: bool,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
    rollout_ids: tuple[str, ...],
    statuses: Statuses,
    modes: Modes,
) -> None:
    """Remove rollouts, with their attempts, spans and logs.

    Ids that the queue does not know are accepted, and their spans and logs removed, so that an interrupted deletion can be repeated.
    Spans that arrive later are stored. Deleted data are invisible to queries when this command ends, and leave every file within 24 hours
    (`agl-otel maintain`, a part of `up`, clears them), or before it ends with --wait.
    """
    _check_named(rollout_ids, statuses, modes)
    if not yes and not as_json:
        click.confirm("This removes them for good. Go on?", abort=True)
    settings = settings_for(data_dir, store)

    async def main() -> None:
        from agl_otel.cli.erase import eraser

        async with open_queue(data_dir, store, only=("queue",) if keep_spans else BOTH_STORES) as queue:
            ids = [*dict.fromkeys(rollout_ids)] or await _selected(queue, (), statuses, modes)
            async with eraser(settings, queue, keep_spans=keep_spans, wait=wait) as remove:
                await _in_chunks("deleted", ids, remove, as_json=as_json)

    run_async(main)


@rollouts.command()
@click.argument("tasks", nargs=-1, metavar="[TASK]…")
@click.option("--file", "file", type=click.File("rb"), help="Tasks, one JSON value a line; - reads stdin.")
@click.option("--mode", type=RunMode(), help="For lines that name none.")
@click.option("--resources-id", help="For lines that name none.  [default: the latest]")
@click.option("--max-attempts", type=Whole(1), default=1, show_default=True, help="For lines that name none.")
@click.option(
    "--timeout", "timeout_seconds", type=Finite(min=0, min_open=True), help="Seconds an attempt may take; for lines that name none."
)
@click.option(
    "--unresponsive",
    "unresponsive_seconds",
    type=Finite(min=0),
    default=UNRESPONSIVE_SECONDS,
    show_default=True,
    help="Seconds without a heartbeat after which an attempt's runner counts as dead (0: never); heartbeats come every 5 s. "
    "For lines that name none.",
)
@click.option("--priority", type=Whole(), default=0, show_default=True, help="Higher ones are claimed first; for lines that name none.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Label for runners that claim by label (repeatable).")
@click.option("--key", help="Idempotency key: repeating the command with the same key and file enqueues nothing new.")
@data_dir_option
@store_option
@json_option
def enqueue(
    tasks: tuple[str, ...],
    file: IO[bytes] | None,
    mode: RolloutMode | None,
    resources_id: str | None,
    max_attempts: int,
    timeout_seconds: float | None,
    unresponsive_seconds: float,
    priority: int,
    labels: tuple[str, ...],
    key: str | None,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Enqueue tasks: each TASK, such as '{"question": "how many?"}', and the lines of --file.

    A TASK or line is the task itself (any JSON value), or an object with `input` and only fields of a rollout: mode, resources_id, config,
    metadata, rollout_id, priority, not_before, labels. An invalid line is named, and nothing is enqueued. JSON is strict: neither NaN
    nor numbers beyond a double's range.

    An attempt whose runner sends no heartbeat for --unresponsive seconds ends: its rollout runs again if --max-attempts allows it, else
    it has failed. These options apply to fields that a line's own config does not set: `"unresponsive_seconds": null` there waits
    for ever.
    """
    config = RolloutConfig(max_attempts=max_attempts, timeout_seconds=timeout_seconds, unresponsive_seconds=unresponsive_seconds or None)
    if max_attempts > 1:
        config.retry_condition = ["failed", "timeout", "unresponsive"]
    defaults: dict[str, Any] = {"mode": mode, "resources_id": resources_id, "config": config.model_dump(), "priority": priority}
    defaults["labels"] = parse_labels(labels) or None
    if not tasks and file is None:
        raise UsageError(
            """there are no tasks: give tasks, or --file; a task is JSON, such as '{"question": "how many?"}' or '"how many?"'"""
        )
    given = [(task.encode(errors="surrogateescape"), f"task {number}") for number, task in enumerate(tasks, 1)]
    given += [(line, f"{file.name}:{number}") for number, line in enumerate(file, 1) if line.strip()] if file is not None else []
    requests = [request_of(line, where, defaults) for line, where in given]

    async def main() -> None:
        ids: list[str] = []
        async with open_queue(data_dir, store) as queue:
            await _must_have(queue, {request.resources_id for request in requests if request.resources_id is not None})
            with progress(silent=as_json) as bar:
                task = bar.add_task("enqueuing", total=len(requests))
                for start in range(0, len(requests), CHUNK):
                    own_key = None if key is None else f"{key}@{start}"
                    ids += [r.rollout_id for r in await queue.enqueue(requests[start : start + CHUNK], idempotency_key=own_key)]
                    bar.update(task, completed=len(ids))
        if as_json:
            print_json({"rollout_ids": ids})
        else:
            click.echo(f"enqueued {len(ids)} rollouts" + (f", {ids[0]} to {ids[-1]}" if ids else ""))

    run_async(main)


async def _must_have(queue: QueueClient, resources_ids: set[str]) -> None:
    """Raise UsageError if the queue lacks resources of one of these ids."""
    found = await queue.query_resources(resources_id_in=sorted(resources_ids))
    if missing := sorted(resources_ids - {update.resources_id for update in found}):
        known = await queue.query_resources(sort_by="update_time", sort_order="desc", limit=SHOWN_RESOURCES)
        names = ", ".join(update.resources_id for update in known) + (", …" if known.total > len(known) else "")
        raise UsageError(f"the queue has no resources {missing[0]!r}; known: {names or 'none'}. `agl-otel resources ls` lists them")


def request_of(line: bytes, where: str, defaults: dict[str, Any]) -> EnqueueRolloutRequest:
    """Parse one line of a file of tasks. Raises UsageError that names the line."""
    try:
        value = strict_json(line.decode())
        is_request = isinstance(value, dict) and "input" in value and FIELDS.issuperset(value)
        fields: dict[str, Any] = {**defaults, **(value if is_request else {"input": value})}
        if isinstance(fields["config"], dict):
            fields["config"] = {**defaults["config"], **fields["config"]}
        request = EnqueueRolloutRequest.model_validate(fields)
        if request.rollout_id is not None:
            check_id(request.rollout_id, "rollout id")
        if request.mode == ADOPTED:
            raise UsageError(NOT_RUN)
        return request
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 (byte {error.start + 1} is {line[error.start]:#04x}): save the file as UTF-8") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{where}: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    except AglError as error:
        raise UsageError(f"{where}: {error}") from None
    except ValueError as error:
        raise UsageError(f"{where} is not JSON ({why_no_json(error)}): write one JSON value a line") from None

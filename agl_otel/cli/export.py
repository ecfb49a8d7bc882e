"""`agl-otel export`: write rollouts as training data with a pin file; rebuild a batch from its pin, or compare other options with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, cast, get_args

import click

from agl_otel.adapters import remedies
from agl_otel.adapters.bias import NO_REWARD
from agl_otel.adapters.exported import Exported
from agl_otel.adapters.formats import as_written
from agl_otel.adapters.masking import MaskRule, masked, parse_rules
from agl_otel.adapters.pins import Differences, Pin, Read
from agl_otel.adapters.records import (
    FORMS,
    PAIR_FORMS,
    REASONS,
    Functions,
    Reading,
    needs_all,
    needs_rated,
    needs_spans,
    reads_spans,
    rows_of,
)
from agl_otel.adapters.sampling import several_choices_warning
from agl_otel.adapters.split_reasons import SPLIT_REASONS
from agl_otel.cli.common import data_dir_option, json_option, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.output import counted
from agl_otel.cli.queue import must_exist, rollouts_of
from agl_otel.cli.selections import Taken, check_one_of, gone_lines, selection_option, taken_selection
from agl_otel.cli.training_files import WRITERS, Write, check_target, to_stdout, writing_rows
from agl_otel.cli.training_steps import run_id_of
from agl_otel.errors import NotFoundError, UsageError, writing
from agl_otel.queue.client import QueueClient
from agl_otel.service.loading import load_function
from agl_otel.stack.sharing import open_store
from agl_otel.store import Store
from agl_otel.text import json_text
from agl_otel.traces.reviews import read_reviews
from agl_otel.types import TRIAL, RolloutMode, Span, VerdictKind, is_trial
from agl_otel.types.columns import Traces
from agl_otel.types.options import Finite, Pattern, Whole
from agl_otel.types.scores import HELD_OUT

PAGE_ROLLOUTS: Final = 1000  # what an export has in memory, twice: the page that is converted, and the next
TASKS_SHOWN: Final = 5
STDOUT: Final = Path("-")
_READING_OPTIONS: Final = tuple(each.name for each in fields(Reading))


@click.command()
@click.argument("target", required=False, type=click.Path(path_type=Path), metavar="[FILE]")
@click.option("--as", "form", type=click.Choice(list(FORMS)), help="What a row is.  [default: trajectories]")
@click.option(
    "--rollout", "rollout_ids", multiple=True, metavar="ID", help="Only these (repeatable).  [default: all that succeeded, of --mode]"
)
@click.option("--run", metavar="RUN", help="Only the rollouts of this run: its id, or its folder.")
@selection_option
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(get_args(RolloutMode)),
    help="Only these modes (repeatable).  [default: all but val and test, whose tasks score the training]",
)
@click.option("--take", multiple=True, type=click.Choice(get_args(VerdictKind)), help="Verdicts to take.  [default: complete, unproven]")
@click.option("--agent-match", type=Pattern(), metavar="REGEX", help="Only the calls of agents whose names match.")
@click.option("--reward", metavar="NAME", help="The reward dimension to use.  [default: the primary one]")
@click.option(
    "--reward-source", metavar="SOURCE", multiple=True, help="Whose rewards count (repeatable): runner, agent, or a source of feedback."
)
@click.option("--rubric", metavar="NAME@VERSION", help="The reward is the mean of the reviews under this rubric; see the page /review.")
@click.option("--fill-reward", type=Finite(), help="Reward of attempts without one.  [default: they are refused]")
@click.option("--min-reward", type=Finite(), help="Leave out attempts with a lower reward.")
@click.option("--top-fraction", type=Finite(0, 1, min_open=True), help="Keep the best attempts, this share of them.")
@click.option("--best-of-group", type=Whole(1), metavar="N", help="Keep the N best attempts of each task.")
@click.option("--by-call", is_flag=True, default=None, help="A row for each model call, with the reward of its attempt.")
@click.option(
    "--call-rewards", is_flag=True, default=None, help="With --by-call: use the reward that the agent gave a call, not its attempt's."
)
@click.option("--discount", type=Finite(0, 1), help="With --by-call or --returns: factor on a reward for each later call.  [default: 1]")
@click.option("--returns", is_flag=True, default=None, help="Add each call's return: what it receives of all rewards of its attempt.")
@click.option("--max-prompt-tokens", type=Whole(1), help="Refuse longer prompts.")
@click.option("--max-response-tokens", type=Whole(1), help="Truncate longer responses.")
@click.option("--adapter", metavar="FUNCTION", help="Instead of --as: a function from an attempt's spans to rows.")
@click.option("--reward-function", metavar="FUNCTION", help="A function from an attempt's spans to its reward, or None.")
@click.option("--filter", "filter", metavar="FUNCTION", help="A function from a row to whether it is kept.")
@click.option("--mask", "mask_file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Masking rules (TOML).")
@click.option(
    "--rebuild", "rebuild_pin", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Rebuild the batch of this pin."
)
@click.option(
    "--diff",
    "diff_pin",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read the rollouts of this pin with the other options, and show the differences.",
)
@click.option("--force", is_flag=True, help="Replace FILE and its pin if they are there already.")
@data_dir_option
@store_option
@json_option
def export(
    target: Path | None,
    rollout_ids: tuple[str, ...],
    run: str | None,
    selection: str | None,
    modes: tuple[RolloutMode, ...],
    mask_file: Path | None,
    rebuild_pin: Path | None,
    diff_pin: Path | None,
    force: bool,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Write training data to FILE (.jsonl, .parquet, or a folder for Hugging Face's datasets), with FILE.pin.json beside it.
    With - as FILE the rows go to standard output as JSON lines, without a pin, and messages to standard error.

    \b
    trajectories  conversations with token ids, mask and log-probs      transitions  the same, each call a row
    messages      chat messages, from any instrumentation               triplets     Agent Lightning 0.3's
    sft           input_ids, labels, attention_mask                     dpo          chosen and rejected, same task and prompt
    openai        messages and tools, whole conversations               openai_dpo   preferred and not, same task and messages
    tinker        model_input, target_tokens, weights                   demonstrations  as openai, with reviewers' corrections

    A FUNCTION is path/to/file.py:name or package.module:name. With --diff, it shows what another adapter, reward or filter would change.

    Masking rules are tables [[rule]] with action (drop_text, hash_text, drop_ids) and any of role, text, agent (regular expressions), salt.
    """
    setup_logging()
    if sum((target is None, diff_pin is None)) != 1 or (rebuild_pin is not None and diff_pin is not None):
        raise UsageError("name a FILE to write (also with --rebuild), or a pin with --diff, not both")
    if target is not None and target.suffix not in WRITERS:
        raise UsageError(
            f"{target.name} is neither .jsonl nor .parquet, nor a folder (a name without an ending): the ending selects the format"
        )
    if target is not None and target.suffix and not target.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {target.parent} to write {target.name} in: make it first")
    if target is not None and target != STDOUT:
        check_target(target, _pin_file(target), replace=force)
    check_one_of(selection, run=run, rollout=rollout_ids, mode=modes)
    if run is not None and rollout_ids:
        raise UsageError("--run and --rollout both say which rollouts to take: give one")
    changes = {name: given[name] for name in _READING_OPTIONS if given[name] not in (None, ())}
    pin = _pin(rebuild_pin or diff_pin)
    if rebuild_pin is not None and (changes or rollout_ids or run is not None or selection is not None or modes):
        raise UsageError("--rebuild uses the options in the pin: use --diff to try others")
    rules = parse_rules(mask_file.read_bytes(), str(mask_file)) if mask_file is not None else []
    run_id = None if run is None else run_id_of(run)
    settings = settings_for(data_dir, store)

    async def main() -> dict[str, Any]:
        async with open_store(settings) as opened:
            if pin is None and selection is not None:
                taken = await taken_selection(opened, selection)
                return await _write(opened, cast("Path", target), Reading(**changes), rules, taken.ids, None, taken)
            if pin is None:
                ids, left_out = await must_exist(opened.queue, rollout_ids, opened.reader), {}
                if not ids:
                    ids, left_out = await ids_of_modes(opened.queue, modes, run_id)
                return await _write(opened, cast("Path", target), Reading(**changes), rules, ids, None) | {"left_out": left_out}
            if diff_pin is not None:
                return await _compare(opened, pin, changes)
            return await _write(opened, cast("Path", target), pin.reading, rules or pin.rules, list(pin.rollouts), pin)

    report = run_async(main)
    click.echo(json_text(report) if as_json else "\n".join(_lines(report)), err=target == STDOUT)


async def ids_of_modes(
    queue: QueueClient, modes: Sequence[RolloutMode], run: str | None, *, since: float = 0.0
) -> tuple[list[str], dict[str, int]]:
    """Return the ids of the rollouts of these modes, and of this run (None: of all), that succeeded; without modes of all but HELD_OUT. And
    {mode, or TRIAL: how many are left out}. Those from before `since` (Unix seconds) are passed over. Raises NotFoundError if no rollout is
    of this run."""
    ids, left_out = list[str](), Counter[str]()
    if run is not None and not await queue.query_runs(run):
        raise NotFoundError(f"no rollout is of a run {run!r}: `agl-otel runs ls` lists the runs")
    async for rollout in rollouts_of(queue, ["succeeded"], modes, run=run):
        if rollout.start_time < since:
            continue
        if is_trial(rollout):
            left_out[TRIAL] += 1
        elif not modes and rollout.mode in HELD_OUT:
            left_out[rollout.mode] += 1
        else:
            ids.append(rollout.rollout_id)
    return ids, dict(left_out)


def functions_of(reading: Reading) -> Functions:
    """Load the user's functions that `reading` names. Raises UsageError."""
    named = (reading.adapter, reading.reward_function, reading.filter)
    loaded = [load_function(name) if name else None for name in named]
    adapter = loaded[0]
    return Functions(adapter() if isinstance(adapter, type) else adapter, *loaded[1:])  # a class is an adapter of Agent Lightning 0.3


async def _pages(
    store: Store, ids: Sequence[str], readings: Sequence[Reading], pin: Pin | None = None
) -> AsyncGenerator[tuple[Traces, Sequence[Span]]]:
    """Read rollouts in pages by the order of their ids, which is that of the rows; each while the caller converts the one before.

    If a row may depend on other rollouts, all are one page. With a pin, feedback that came since is left out.
    """
    size = max(len(ids), PAGE_ROLLOUTS) if any(map(needs_all, readings)) else PAGE_ROLLOUTS
    ids = ids if len(ids) <= size else sorted(ids)

    async def read(some: Sequence[str]) -> tuple[Traces, Sequence[Span]]:
        texts, tree = not all(map(reads_spans, readings)), any(each.returns for each in readings)
        rated = None if pin is None else [each for rollout_id in some for each in pin.evaluations.get(rollout_id, ())]
        traces = await store.traces(some, deadline_seconds=0, texts=texts, tree=tree, evaluations=rated)
        known = [rollout.rollout_id for rollout in traces.rollouts]
        if not any(map(needs_spans, readings)):
            known = [each for each in known if each in traces.evaluations] if any(map(needs_rated, readings)) else []
        return traces, await store.spans(known, evaluations=rated) if known else []

    ahead = asyncio.ensure_future(read(ids[:size]))
    try:
        for start in range(size, len(ids), size):
            page, ahead = await ahead, asyncio.ensure_future(read(ids[start : start + size]))
            yield page
        yield await ahead
    finally:
        ahead.cancel()


async def _write(
    store: Store,
    target: Path,
    reading: Reading,
    rules: Sequence[MaskRule],
    ids: Sequence[str],
    pin: Pin | None,
    taken: Taken | None = None,
) -> dict[str, Any]:
    """Write the rows of these rollouts, and the pin; of a given pin its batch again. Raises UsageError, ConflictError, and writes nothing.

    The rows of a user's adapter cannot be masked by rules.
    """
    if rules and reading.adapter:
        raise UsageError(
            f"masking rules do not know the rows of an adapter of your own ({reading.adapter}) and would leave texts in them: "
            "export a form of ours, or mask in the collector (AGL_MASK)"
        )
    if reading.rubric is not None and not await read_reviews(store.reader, rubric=reading.rubric, limit=1):
        raise UsageError(
            f"no review is stored under the rubric {reading.rubric!r}: name it as NAME@VERSION, as the dashboard's page /review does"
        )
    named = (taken.selection.selection, taken.selection.digest) if taken is not None else pin.selection if pin is not None else None
    exported, functions = Exported(reading, rules, selection=named), functions_of(reading)

    def convert(write: Write, traces: Traces, spans: Sequence[Span]) -> None:
        found = rows_of(reading, traces, spans, functions)
        found = replace(found, rows=[masked(row, rules) for row in found.rows]) if rules else found
        exported.add(traces, found)
        write(found.rows if reading.adapter else [as_written(reading.form, row) for row in found.rows])

    with _opened(target, rebuilt=pin is not None) as write:
        async with aclosing(_pages(store, ids, (reading,), pin)) as pages:
            async for traces, spans in pages:
                await asyncio.to_thread(convert, write, traces, spans)
        exported.check_reward()
        if pin is not None:
            pin.check(exported.pin(ids))
    pin_file = None if target == STDOUT else _pin_file(target)
    if pin_file is not None:
        with writing(str(pin_file)):
            pin_file.write_text(exported.pin(ids).dumps())
    where = {"file": "standard output" if pin_file is None else str(target), "pin": pin_file and str(pin_file), "form": reading.form}
    figures = exported.figures()
    selected = {} if taken is None else {"selection": taken.report()}
    return {**where, **selected, **figures, "remedies": {why: remedies.of(why) for why in figures["refused"] if why in remedies.REFUSED}}


@contextmanager
def _opened(target: Path, *, rebuilt: bool) -> Generator[Write]:
    """Open FILE for rows. Raises UsageError."""
    if target == STDOUT:
        with to_stdout(at_end=rebuilt) as write:
            yield write
        return
    with writing(str(target)), writing_rows(target) as write:
        yield write


def _pin_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.pin.json")


async def _compare(store: Store, pin: Pin, changes: dict[str, Any]) -> dict[str, Any]:
    """Compare the rows of the pin's rollouts with those that other options make of them."""
    readings = pin.reading, replace(pin.reading, **changes)
    functions = [functions_of(reading) for reading in readings]
    read, differences, refused = Read(), Differences(), (Counter[str](), Counter[str]())
    async with aclosing(_pages(store, list(pin.rollouts), readings)) as pages:
        async for traces, spans in pages:
            old, new = (rows_of(reading, traces, spans, own) for reading, own in zip(readings, functions, strict=True))
            read.add(traces)
            differences.add(old.rows, new.rows)
            for counts, found in zip(refused, (old, new), strict=True):
                counts.update(found.refused)
    return {
        **differences.report(),
        "refused": dict(zip(("old", "new"), map(dict, refused), strict=True)),
        "since_the_pin": pin.changes(read),
    }


def _pin(path: Path | None) -> Pin | None:
    return Pin.loads(path.read_bytes(), str(path)) if path is not None else None


def _lines(report: dict[str, Any]) -> list[str]:
    if "file" in report:
        return [
            f"wrote {counted(report['rows'], 'row')} to {report['file']}, made of {report['rollouts_used']} of "
            f"{counted(report['rollouts'], 'rollout')}"
            f"{_others(report)}",
            *(f"  {why}: {REASONS[why]}. Remedy: {remedies.of(why)}" for why in sorted(report["refused"]) if why in REASONS),
            *(gone_lines(report["selection"]) if "selection" in report else []),
            *_breaks(report["breaks"]),
            *_in_training(report["in_training"]),
            *(
                "left out: "
                + (
                    f"{count} trials, made by `agl-otel run` and `doctor` (--rollout takes one by its id)"
                    if mode == TRIAL
                    else f"{count} rollouts of mode {mode}, whose tasks score the training (--mode {mode} takes them)"
                )
                for mode, count in sorted(report.get("left_out", {}).items())
            ),
            *(
                [f"{report['without_messages']} rows have token ids and no messages: none were captured"]
                if report["without_messages"]
                else []
            ),
            *([several_choices_warning(report["several_choices"], report["model_calls"])] if report["several_choices"] else []),
            *(
                _share(_with_reward(name), shares)
                for name, shares in sorted(report["refused_share"]["reward"].items())
                if (name, [*shares]) != (NO_REWARD, ["no_reward"])  # goes without saying
            ),
            *(_share(f"at task {name}", shares) for name, shares in _most_refused(report["refused_share"]["task"])),
        ]
    changed = ", ".join(f"{name} in {count}" for name, count in report["changed"].items()) or "nothing"
    old, new = report["reward_mean"]
    return [
        f"{report['old']} rows before, {report['new']} now: {report['same']} the same, {report['only_old']} gone, {report['only_new']} new",
        f"changed: {changed}",
        f"mean reward: {old} before, {new} now",
        *(f"since the pin: {change}" for change in report["since_the_pin"]),
    ]


def _others(report: dict[str, Any]) -> str:
    """Say, as the end of a sentence about the rollouts in rows, what was refused, and why other rollouts are in none."""
    refused = ", ".join(f"{count} {why}" for why, count in sorted(report["refused"].items()))
    said = f"; of their attempts and model calls were refused: {refused}" if refused else "; the export refused nothing"
    if report["rollouts"] == report["rollouts_used"] or (refused and report["form"] not in PAIR_FORMS):
        return said
    others = "the adapter made none of their spans"
    if report["form"] in PAIR_FORMS:
        others = "a pair has the best and the worst attempt at a task, and leaves out those between"
    return f"{said}; the others are in no row: {others}"


def _breaks(counts: dict[str, int]) -> list[str]:
    """Say why rows do not go on from an earlier call of their attempt."""
    if not counts:
        return []
    return [
        f"{counted(sum(counts.values()), 'row')} beside the first of an attempt, because a call does not go on from an earlier one:",
        *(f"  {count} {why}: {SPLIT_REASONS[why]}. Remedy: {remedies.SPLIT[why]}" for why, count in sorted(counts.items())),
    ]


def _in_training(found: dict[str, Any]) -> list[str]:
    """Say what GRPO would refuse of the rows, which an export leaves in; nothing where it would take all."""
    if not found["refused"]:
        return []
    counts = ", ".join(f"{count} {why}" for why, count in sorted(found["refused"].items()))
    rows = f"{counted(found['rows_without_calls'], 'row')}, and a part of {found['rows_with_fewer_calls']} more"
    fields = ", ".join(f"{name} {count}" for name, count in sorted(found["differing"].items()))
    return [
        f"in training GRPO would refuse {rows}; of their model calls: {counts}",
        *(
            f"  {why}: {REASONS[why]}{f', by {fields}' if why == 'sampling_differs' else ''}. "
            f"Remedy: {remedies.of(why, found['differing'])}"
            for why in sorted(found["refused"])
        ),
    ]


def _most_refused(tasks: dict[str, dict[str, float]]) -> list[tuple[str, dict[str, float]]]:
    return sorted(tasks.items(), key=lambda each: (-sum(each[1].values()), each[0]))[:TASKS_SHOWN]


def _with_reward(name: str) -> str:
    return "without a reward" if name == NO_REWARD else f"with a reward of {name}"


def _share(of: str, shares: dict[str, float]) -> str:
    return f"of the attempts {of}, " + ", ".join(f"{100 * share:.0f} % were refused: {why}" for why, share in sorted(shares.items()))

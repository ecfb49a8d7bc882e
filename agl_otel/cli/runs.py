"""`agl-otel runs`: list, show and compare runs, and export their models: rewards, verdicts, tokens, cost and differences in configuration.

A run joins the rollouts of the queue (Run) with the recorded training steps (TrainingRun) of the same id. Figures are computed in
run_figures.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text

from agl_otel.adapters.cycles import IMPROVE
from agl_otel.adapters.losses import CUT, cut_replies
from agl_otel.algorithms.run_result import result_if_any
from agl_otel.algorithms.validation import validations
from agl_otel.cli.common import Folder, data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.cycles import cycle_rows, promoted_of, reason_lines
from agl_otel.cli.output import clock, counted, lasted, open_console, plain, table_of
from agl_otel.cli.run_figures import RunReport, chosen_metrics, cost_of, differences, sparkline, thinned
from agl_otel.cli.training_steps import configuration_of, forced_of, run_id_of
from agl_otel.errors import NotFoundError, UsageError
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.settings import Settings
from agl_otel.stack.sharing import open_store
from agl_otel.store import Store
from agl_otel.text import printable_lines
from agl_otel.traces.figures import Curve, curve_of
from agl_otel.types import Run, TrainingRun
from agl_otel.types.options import Finite, Whole

VERDICT_ROLLOUTS: Final = 1000  # the rollouts that ended last, whose verdicts are counted
_price_option: Any = click.option(
    "--price", nargs=2, type=Finite(0), metavar="PROMPT RESPONSE", help="Price of a million prompt and response tokens."
)
_points_option: Any = click.option(
    "--points", type=Whole(2), default=20, show_default=True, help="Show so many steps, and the validated ones."
)


@click.group()
def runs() -> None:
    """List runs, show one, compare several, or export a run's model.

    RUN is a run's id (or that of the resources its rollouts use), or its folder.
    """


@runs.command()
@click.option("--limit", type=Whole(0), default=20, show_default=True)
@data_dir_option
@store_option
@json_option
def ls(limit: int, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """List runs, the latest first."""
    settings = _begin(data_dir, store)

    async def main() -> None:
        async with open_store(settings) as opened:
            trained = {each.run_id: each for each in await opened.training_runs(limit=limit)}
            known = {each.run_id: each for each in await opened.queue.query_runs()}
        started = {each.run_id: each.start_time for each in (*trained.values(), *known.values())}
        order = sorted(started, key=lambda run_id: started[run_id], reverse=True)
        rows = [(run_id, known.get(run_id), trained.get(run_id)) for run_id in order[:limit]]
        if as_json:
            print_json({"total": len(order), "items": [_as_json(*row) for row in rows]})
        else:
            open_console().print(table_of(f"{len(rows)} of {counted(len(order), 'run')}", _LISTED, [_line(*row) for row in rows]))

    run_async(main)


@runs.command()
@click.argument("run")
@_price_option
@_points_option
@data_dir_option
@store_option
@json_option
def show(run: str, price: tuple[float, float] | None, points: int, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Show one run: rollouts by status, verdicts, tokens, cost, and rewards step by step.

    Of a run of `improve` it shows the cycles, the one under way too: evidence, canary, verdict, versions, and what spoke against them.
    """
    settings = _begin(data_dir, store)

    async def main() -> None:
        async with open_store(settings) as opened:
            report = await read_run(opened, run)
        if as_json:
            print_json({**report.as_json(), "cost": cost_of(report, price)})
            return
        console = open_console()
        console.print(table_of(report.run_id, ("what", "how much"), [row for row in _summary(report, price) if row[1] not in (None, "")]))
        if report.outcome and report.outcome != _word(report.outcome):
            console.print(printable_lines(report.outcome), soft_wrap=True, markup=False, highlight=False, style="red")
        for line in report.result.lines() if report.result is not None else ():
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        for name, series in report.series().items():
            if name in ("reward", "val_reward"):
                values = [series[step] for step in sorted(series)]
                console.print(Text(f"{name} {sparkline(values)} {values[0]:.4g} → {values[-1]:.4g}"))
        if report.cycles:
            columns, rows = cycle_rows(report.cycles)
            console.print(table_of("cycles", columns, rows))
            for told in reason_lines(report.cycles, now=0.0 if report.outcome else time.time()):
                console.print(told, soft_wrap=True)
        if metrics := chosen_metrics([report], ())[:4]:
            console.print(_by_step([report], metrics, points, title=f"by {report.curve.by}"))
        if lost := report.losses():
            console.print(table_of("what steps lost", ("step", "lost"), [(step, lost[step]) for step in thinned(sorted(lost), points)]))
        if cut := {step: cut_replies(count) for step, count in report.series().get(CUT, {}).items() if count}:
            rows = [(step, cut[step]) for step in thinned(sorted(cut), points)]
            console.print(table_of("what was cut, and is trained on", ("step", "cut"), rows))

    run_async(main)


@runs.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN…")
@click.option("--metric", "metrics", multiple=True, help="Which metrics to show by step (repeatable).  [default: rewards]")
@_price_option
@_points_option
@data_dir_option
@store_option
@json_option
def compare(
    runs: tuple[str, ...],
    metrics: tuple[str, ...],
    price: tuple[float, float] | None,
    points: int,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Compare runs: differences in configuration (of runs given as folders), totals, and metrics by step."""
    settings = _begin(data_dir, store)

    async def main() -> None:
        async with open_store(settings) as opened:
            reports = [await read_run(opened, each) for each in runs]
        names = chosen_metrics(reports, metrics)
        if as_json:
            described = [{**report.as_json(), "cost": cost_of(report, price)} for report in reports]
            print_json({"runs": described, "differences": differences(reports), "metrics": names})
            return
        console, headings = open_console(), [report.run_id for report in reports]
        unknown = [report.run_id for report in reports if report.configuration is None]
        changed = [(name, *values) for name, values in differences(reports).items()]
        if changed:
            console.print(table_of("differences in configuration", ("option", *headings), changed))
        if unknown:
            console.print(f"the configuration of {', '.join(map(plain, unknown))} is unknown: give the run's folder", style="dim")
        rows = [(row[0][0], *(value for _, value in row)) for row in zip(*(_summary(report, price) for report in reports), strict=True)]
        known = [row for row in rows if any(value not in (None, "") for value in row[1:])]
        console.print(table_of("totals", ("what", *headings), known))
        for name in names:
            console.print(_by_step(reports, [name], points, title=name))

    run_async(main)


@runs.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("target", type=Folder(), metavar="DIR")
@click.option("--step", type=Whole(1), help="The weights after this step.  [default: those of the best validation, else the last ones]")
@click.option("--last", is_flag=True, help="The last weights that the run keeps.")
@click.option("--adapter", is_flag=True, help="Only the LoRA adapter, as peft and `vllm serve --lora-modules` load it.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of the weights.  [default: as the run has them]")
@click.option("--base", metavar="MODEL", help="Where the model now is that a LoRA run began with.  [default: where it was]")
@json_option
def export(
    run: Path, target: Path, step: int | None, last: bool, adapter: bool, dtype: str | None, base: str | None, as_json: bool
) -> None:
    """Write the trained model of RUN, a run's folder, to the new folder DIR.

    DIR then has weights, config, tokenizer, chat template and generation config, as `AutoModelForCausalLM.from_pretrained`, `vllm serve`
    and [policy] model open them. A LoRA adapter is merged into the weights, unless --adapter asks for it alone. The run may go on:
    its last complete checkpoint is read. Weights are compared with their digests, and so is the model that a LoRA run began with, which
    must still be there, since checkpoints hold the adapter alone.

    Runs of grpo, sft and verl have weights. Checkpoints of verl are merged by verl's own program, to bfloat16, in the environment of the
    run.
    """
    from agl_otel.algorithms.model_export import export_model
    from agl_otel.algorithms.run_result import instead_of_best

    setup_logging()
    if step is not None and last:
        raise UsageError("--step and --last exclude each other: give one")
    done = export_model(run, target, step=step, last=last, adapter=adapter, dtype=dtype, base=base)
    if done.best_missing is not None:
        click.echo(f"warning: {printable_lines(instead_of_best(done.best_missing))}", err=True)
    if as_json:
        print_json(asdict(done))
        return
    kind = "LoRA adapter" if done.adapter else "weights"
    text = f"{done.folder}: the {done.which} {kind}, after step {done.step} ({done.dtype}, {done.bytes / 1e6:,.1f} MB)"
    open_console().print(text, soft_wrap=True, markup=False, highlight=False)


async def read_run(store: Store, run: str) -> RunReport:
    """Read all data of a run. Raises NotFoundError if neither store knows it, DataError for a damaged folder."""
    run_id = run_id_of(run)
    known, steps, stages, members, trained = await asyncio.gather(
        store.queue.query_runs(run_id),
        store.training_steps(run_id),
        store.training_stages(run_id),
        store.queue.query_run_members(run_id),
        store.training_runs(run_id=run_id),
    )
    training = next((each for each in trained if each.run_id == run_id), None)
    if not known and training is None:
        raise NotFoundError(f"there is no run {run_id!r}: `agl-otel runs ls` lists the runs")
    curve, verdicts, alarms = Curve("step", []), Counter[str](), 0
    if members.rollout_ids:
        table = await store.reader.run_figures(members.rollout_ids)
        curve = await asyncio.to_thread(curve_of, members, table, frozenset(FINISHED))
        ended = await store.queue.query_rollouts(run=run_id, status_in=sorted(FINISHED), sort_order="desc", limit=VERDICT_ROLLOUTS)
        ids = [rollout.rollout_id for rollout in ended]
        attempts = await store.queue.query_attempts(ids, latest_only=True) if ids else []
        found = await store.reader.figures(list(attempts))
        verdicts = Counter(each.verdict.kind for each in found)
        alarms = sum(each.verdict.alarm for each in found)
    return RunReport(
        run_id, known[0] if known else None, steps, curve.of_training(training), dict(verdicts), alarms, configuration_of(run),
        validations(Path(run)), result_if_any(Path(run)), training, forced_of(run), stages,
    )  # fmt: skip


def _begin(data_dir: Path | None, store: str | None) -> Settings:
    setup_logging()
    return settings_for(data_dir, store)


_LISTED: Final = ("run", "algorithm", "outcome", "steps", "version", "rollouts", "finished", "failed", "began", "last end")


def _line(run_id: str, run: Run | None, trained: TrainingRun | None) -> tuple[object, ...]:
    counts: Mapping[Any, int] = run.by_status if run else {}
    finished = sum(counts.get(status, 0) for status in FINISHED)
    ends = [each.end_time for each in (run, trained) if each is not None and each.end_time is not None]
    return (
        run_id or "(none)",
        trained.algorithm if trained else None,
        _outcome(trained) if trained else None,
        trained.steps if trained else run.last_step if run else None,
        trained.last_version if trained else None,
        f"{run.rollouts:,}" if run else None,
        f"{finished:,}" if run else None,
        f"{counts.get('failed', 0):,}" if run else None,
        clock(min(each.start_time for each in (run, trained) if each is not None)),
        clock(max(ends, default=None)),
    )


def _as_json(run_id: str, run: Run | None, trained: TrainingRun | None) -> dict[str, Any]:
    return {"run_id": run_id, "rollouts": run.model_dump() if run else None, "training": trained.model_dump() if trained else None}


def _summary(report: RunReport, price: tuple[float, float] | None) -> list[tuple[str, object]]:
    """Return rows (what, how much), the same ones for every run."""
    totals, run = report.totals(), report.run
    cost = cost_of(report, price)
    return [
        ("algorithm", report.algorithm or None),
        ("steps", len(report.steps) if report.training is not None else run.last_step if run else None),
        ("outcome", _outcome(report.training) if report.training else None),
        ("version", report.steps[-1].version_after if report.steps else None),
        ("rollouts", f"{run.rollouts:,}" if run else None),
        ("by status", _counts(run.by_status) if run else None),
        ("attempts", f"{run.attempts:,}" if run else None),
        (f"verdicts of the last {VERDICT_ROLLOUTS:,}", _counts(report.verdicts) + (f", {report.alarms} ALARMS" if report.alarms else "")),
        ("reward, mean of the last step", totals["last_reward"]),
        ("reward, best step", totals["best_reward"]),
        ("validated without reward", _of_validated(totals["validated_without_reward"], totals["validated"])),
        ("best validation", report.best_described()),
        ("lost in training", report.lost() or None),
        ("cut, and trained on", cut_replies(totals[CUT]) or None),
        ("other code", "; ".join(f"{name} after {done} steps" for done, name in report.other_code().items()) or None),
        ("prompt tokens", f"{totals['prompt_tokens']:,}" if totals["prompt_tokens"] else None),
        ("response tokens", f"{totals['response_tokens']:,}" if totals["response_tokens"] else None),
        ("cost", None if cost is None else f"{cost:,.4g}"),
        ("began", clock(report.start_time)),
        ("took from the first rollout", lasted(report.seconds)),
    ]


def _outcome(trained: TrainingRun) -> str:
    words = [_word(trained.outcome), promoted_of(trained) if trained.algorithm == IMPROVE and trained.steps else ""]
    return ", ".join(word for word in words if word)


def _word(outcome: str) -> str:
    """Return the first word of TrainingRun.outcome, without the error itself."""
    return outcome.partition(":")[0]


def _of_validated(missing: int, validated: int) -> str | None:
    return f"{missing:,} of {validated:,}, which count as 0" if missing else None


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count)


def _by_step(reports: Sequence[RunReport], names: Sequence[str], points: int, *, title: str) -> Any:
    series = [report.series().get(name, {}) for report in reports for name in names]
    headings = names if len(reports) == 1 else [report.run_id for report in reports]
    every = sorted({step for each in series for step in each})
    steps = thinned(every, points, keep={step for report in reports for step in report.series().get("val_reward", {})})
    if len(steps) < len(every):
        title += f", {len(steps)} of {len(every)} (--points {len(every)} shows all)"
    rows = [(step, *(None if (value := each.get(step)) is None else f"{value:.6g}" for each in series)) for step in steps]
    parts = all(report.curve.by == "order" for report in reports) and not any(report.steps for report in reports)
    return table_of(title, ("part" if parts else "step", *headings), rows)

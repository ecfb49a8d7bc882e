"""`agl-otel judge`: have a model score attempts by a rubric, and compare it with people."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, get_args

import click
from rich.table import Table

from agl_otel.adapters.judging import PROMPT
from agl_otel.adapters.reviews import calibration
from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.model_access import check_not_proxy, checked_endpoint, key_env_option, key_of
from agl_otel.cli.output import counted, open_console, table_of
from agl_otel.cli.queue import must_exist, span_of_time
from agl_otel.cli.selections import check_one_of, gone_lines, selection_option, taken_selection
from agl_otel.errors import UsageError
from agl_otel.jobs.judge import REFUSALS, UNCHANGED, Chosen, Judge, Outcome, Pending
from agl_otel.jobs.model_client import Access, Bounds, ModelClient, Price, Spend
from agl_otel.stack.sharing import open_store
from agl_otel.store import Store
from agl_otel.text import printable, printable_lines
from agl_otel.traces.reviews import read_reviews
from agl_otel.types import RolloutMode
from agl_otel.types.options import Finite, Whole
from agl_otel.types.reviews import JUDGE, Agreement, Calibration

OPENAI: Final = "https://api.openai.com/v1"
COMPARED: Final = 20_000
"""Reviews that a calibration reads: the latest under the rubric."""
CHARACTERS_PER_TOKEN: Final = 4  # for the estimate of --dry-run


class _Price(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]  # click 8.2 takes none
    """PROMPT/ANSWER, two numbers."""

    name = "price"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Price:
        """Return the price."""
        if isinstance(value, Price):
            return value
        parts = str(value).split("/")
        if len(parts) != 2:
            self.fail(f"{value!r} is not PROMPT/ANSWER: two prices in US dollars for a million tokens, as in 0.15/0.60", param, ctx)
        return Price(*(Finite(0).convert(part, param, ctx) for part in parts))


@click.command()
@click.option("--rubric", required=True, metavar="NAME[@VERSION]", help="A rubric of the page /review; its current version.")
@click.option("--model", required=True, help="The judge, by the name that its server has for it.")
@click.option("--endpoint", metavar="URL", help="Its server, with OpenAI's API.  [default: OPENAI_BASE_URL, else OpenAI's]")
@key_env_option
@click.option("--rollout", "rollout_ids", multiple=True, metavar="ID", help="Only these (repeatable), also trials.  [default: all]")
@selection_option
@click.option("--run", metavar="RUN", help="Only the rollouts of this run.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(get_args(RolloutMode)), help="Only these modes (repeatable).")
@click.option("--since", metavar="SPAN", help="Only what ended at most so long ago: 12h, 7d, 2w.")
@click.option("--limit", type=Whole(1), help="At most so many attempts, the latest first, of a selection in its order.")
@click.option("--max-calls", type=Whole(1), help="At most so many requests to the model.")
@click.option("--max-tokens", type=Whole(1), help="At most so many tokens, of prompts and answers.")
@click.option("--max-cost", type=Finite(0, min_open=True), metavar="USD", help="At most so many US dollars, by --price.")
@click.option("--budget", type=Finite(0, min_open=True), metavar="USD", help="At most so many US dollars in all runs of this judge.")
@click.option("--price", type=_Price(), metavar="PROMPT/ANSWER", help="US dollars for a million tokens, as in 0.15/0.60.")
@click.option("--max-answer-tokens", type=Whole(1), default=1024, show_default=True, help="Of one answer, with its reasoning.")
@click.option("--temperature", type=Finite(0, 2), default=0.0, show_default=True, help="Some reasoning models take nothing but 1.")
@click.option("--at-once", type=Whole(1, 256), default=4, show_default=True, help="Requests in flight.")
@click.option("--retry-refused", is_flag=True, help="Also ask again about attempts without a verdict, for which it was asked.")
@click.option("--dry-run", is_flag=True, help="Ask nothing: count the attempts, estimate the tokens, show the first prompt.")
@click.option("--calibrate", is_flag=True, help="Ask nothing: compare the verdicts that are stored with those of people.")
@data_dir_option
@store_option
@json_option
def judge(
    rubric: str,
    model: str,
    rollout_ids: tuple[str, ...],
    selection: str | None,
    run: str | None,
    modes: tuple[RolloutMode, ...],
    since: str | None,
    limit: int | None,
    price: Price | None,
    retry_refused: bool,
    dry_run: bool,
    calibrate: bool,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Have a model score attempts by a rubric. Its verdicts are feedback of the source judge:MODEL.

    Of each rollout that has ended the latest attempt is judged, once for each version of the rubric and model, and again if its
    conversation has gone on since: the same command goes on where it was stopped or killed. It needs a bound: --limit, --max-calls,
    --max-tokens or --max-cost for this run alone, or --budget for all runs of this judge under this version of the rubric. It stops before
    a call that might exceed the bound.
    """
    setup_logging()
    bounds = Bounds(given["max_calls"], given["max_tokens"], given["max_cost"], given["budget"])
    asks = not (dry_run or calibrate)
    if asks and limit is None and not any(each is not None for each in bounds):
        raise UsageError(
            "a judge needs a bound: give --limit, --max-calls, --max-tokens, --max-cost or --budget; --dry-run estimates what it takes"
        )
    if price is None and (bounds.cost is not None or bounds.budget is not None):
        option = "--budget" if bounds.cost is None else "--max-cost"
        raise UsageError(f"{option} needs --price PROMPT/ANSWER: what a million tokens of this model cost")
    if dry_run and calibrate:
        raise UsageError("--dry-run and --calibrate do not go together")
    check_one_of(selection, rollout=rollout_ids, run=run, mode=modes, since=since)
    chosen = Chosen(rollout_ids=rollout_ids, modes=modes, run=run, since=None if since is None else time.time() - span_of_time(since))
    access = _access(model, given)
    settings = settings_for(data_dir, store)

    async def main() -> None:
        async with open_store(settings) as opened:
            if calibrate:
                _show_calibration(await _calibration(opened, rubric, JUDGE + model), as_json=as_json)
                return
            await must_exist(opened.queue, rollout_ids, opened.reader)
            taken = await taken_selection(opened, selection) if selection is not None else None
            for line in gone_lines(taken.report()) if taken is not None else ():
                click.echo(line, err=True)
            judging = Judge(opened, await opened.rubric(rubric), model)
            pending = await judging.pending(chosen if taken is None else Chosen(rollout_ids=taken.ids), retry_refused=retry_refused)
            if dry_run:
                await _show_estimate(judging, pending, access, price, limit=limit, as_json=as_json)
                return
            check_not_proxy(opened, "--endpoint", access.endpoint, "the judge's")
            spend = Spend(bounds, price, await judging.spent(), judging)
            async with ModelClient(access, spend) as asked:
                outcome = await judging.run(pending.attempts, asked, limit=limit, at_once=given["at_once"])
            report = _report(judging, pending, outcome, spend) | ({} if taken is None else {"selection": taken.report()})
            print_json(report) if as_json else click.echo("\n".join(_lines(report, outcome)))
            if outcome.error is not None:
                raise outcome.error

    run_async(main)


def _access(model: str, given: dict[str, Any]) -> Access:
    endpoint = checked_endpoint("--endpoint", given["endpoint"] or os.environ.get("OPENAI_BASE_URL") or OPENAI)
    key_from = given["key_env"]
    return Access(model, endpoint, key_of(key_from), key_from, given["temperature"], given["max_answer_tokens"])


def _report(judging: Judge, pending: Pending, outcome: Outcome, spend: Spend) -> dict[str, Any]:
    return {
        "source": judging.source,
        "rubric": judging.rubric.rubric,
        "prompt": PROMPT,
        "judged": outcome.judged,
        "judged_before": pending.known + outcome.unchanged,
        "left": len(pending.attempts) - outcome.judged - outcome.refused.total() - outcome.unchanged,
        "labels": {each.label: outcome.labels[each.label] for each in judging.rubric.labels},
        "refused": dict(outcome.refused),
        "calls": spend.calls,
        "prompt_tokens": spend.prompt_tokens,
        "answer_tokens": spend.answer_tokens,
        "estimated_calls": spend.estimated,
        "cost": spend.cost,
        "spent_before": {**spend.earlier._asdict(), "cost": spend.earlier_cost},
        "stopped": outcome.stopped,
        "error": "" if outcome.error is None else str(outcome.error),
    }


def _lines(report: dict[str, Any], outcome: Outcome) -> list[str]:
    labels = ", ".join(f"{count} {printable(label)}" for label, count in report["labels"].items())
    cost = "" if report["cost"] is None else f", ${report['cost']:.4f}"
    estimated = f" (of {counted(report['estimated_calls'], 'call')} the most that it may be)" if report["estimated_calls"] else ""
    return [
        f"{printable(report['source'])} judged {counted(report['judged'], 'attempt')} under {report['rubric']}: {labels}",
        *(
            f"  {count} without a verdict: {REFUSALS[why]}. {outcome.examples[why][0]}: {printable(outcome.examples[why][1])}"
            for why, count in report["refused"].items()
        ),
        f"spent: {counted(report['calls'], 'call')}, {report['prompt_tokens']:,} + {report['answer_tokens']:,} tokens{cost}{estimated}",
        *_spent_before(report["spent_before"]),
        f"judged before: {report['judged_before']:,}; left: {report['left']:,}"
        + (f"; stopped: {outcome.stopped}" if outcome.stopped else ""),
    ]


def _spent_before(spent: dict[str, Any]) -> list[str]:
    cost = "" if spent["cost"] is None else f", ${spent['cost']:.4f} by this price"
    took = f"{counted(spent['calls'], 'call')}, {spent['prompt_tokens']:,} + {spent['answer_tokens']:,} tokens{cost}"
    return [f"spent before, by all earlier runs: {took}"] if spent["calls"] else []


async def _show_estimate(
    judging: Judge, pending: Pending, access: Access, price: Price | None, *, limit: int | None, as_json: bool
) -> None:
    sizes, without, known, first = list[int](), 0, pending.known, ""
    async for _, prompt in judging.prompts(pending.attempts):
        if prompt == UNCHANGED:
            known += 1
            continue
        if isinstance(prompt, str):
            without += 1
            continue
        first = first or "\n\n".join(f"{each['role']}:\n{each['content']}" for each in prompt)
        if len(sizes) == limit:
            break
        sizes.append(sum(len(each["content"]) for each in prompt))
    tokens = sum(sizes) // CHARACTERS_PER_TOKEN
    most = len(sizes) * access.max_answer_tokens
    cost = None if price is None else price.of(tokens, most)
    if as_json:
        counts = {"attempts": len(sizes), "without_prompt": without, "judged_before": known}
        print_json({**counts, "prompt_tokens": tokens, "answer_tokens_at_most": most, "cost_at_most": cost, "first": first})
        return
    click.echo(f"{counted(len(sizes), 'attempt')} to judge, {without} without a prompt, {known} judged before")
    click.echo(f"about {tokens:,} tokens of prompts, and at most {most:,} of answers" + ("" if cost is None else f": at most ${cost:.4f}"))
    if first:
        click.echo(f"the first prompt:\n    {printable_lines(first)}")


async def _calibration(store: Store, rubric: str, source: str) -> Calibration:
    named = rubric if "@" in rubric else (await store.rubric(rubric)).rubric
    return calibration(source, named, await read_reviews(store.reader, rubric=named, limit=COMPARED))


def _show_calibration(found: Calibration, *, as_json: bool) -> None:
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    console = open_console()
    click.echo(f"{printable(found.judge)} has judged {counted(found.judged, 'attempt')} under {printable(found.rubric)}")
    if not found.reviewers:
        click.echo("nobody has reviewed one of them under this rubric: the dashboard's page /review shows them")
        return
    console.print(_agreements(found.reviewers))
    if found.mean_absolute_difference is not None:
        click.echo(f"mean absolute difference from people's rewards: {found.mean_absolute_difference:.3f} of {counted(found.n, 'attempt')}")
    rows = [(each.label, each.value, each.n, _number(each.people), _number(each.fitted)) for each in found.labels]
    console.print(table_of("what people say", ("label", "reward", "attempts", "people's mean", "fitted"), rows))


def _agreements(found: Sequence[Agreement]) -> Table:
    rows = [(each.reviewers[1], each.n, _number(each.observed), each.undefined or _number(each.kappa)) for each in islice(found, 10)]
    return table_of("agreement with people", ("reviewer", "attempts", "same label", "kappa"), rows)


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"

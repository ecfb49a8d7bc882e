"""`agl-otel traces`: the spans of a running stack, or of a stopped stack's data directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.output import open_console, table_of
from agl_otel.cli.render import attempt_tree
from agl_otel.cli.rollouts import one_rollout
from agl_otel.cli.training_steps import steps
from agl_otel.runner.environment import first_llm
from agl_otel.spans.history import expand_spans
from agl_otel.stack.sharing import open_store
from agl_otel.store import Store
from agl_otel.traces.span_query import SpanQuery
from agl_otel.types import Rollout
from agl_otel.types.options import Whole

SHOWN_SPANS: Final = 2_000
AWAY_SECONDS: Final = 5.0  # without ClickHouse: a person waits


@click.group()
def traces() -> None:
    """Look at what agents emitted: one rollout as a tree, the steps of a training run, or SQL."""


traces.add_command(steps)


@traces.command()
@click.argument("rollout_id")
@data_dir_option
@store_option
@click.option("--messages", is_flag=True, help="Show every message of every model call, whole, up to 16 MiB of an attempt.")
@click.option("--limit", type=Whole(-1), default=SHOWN_SPANS, show_default=True, help="Show so many spans at most; -1: all.")
@json_option
def show(rollout_id: str, data_dir: Path | None, store: str | None, messages: bool, limit: int, as_json: bool) -> None:
    """Show the spans of one rollout as a tree, with its verdict.

    A model call that both agent and proxy recorded is one node, and so is the HTTP client's span between them (POST). Seals are left out,
    too; --json and `agl-otel traces sql` have every span.

    ROLLOUT_ID may be shortened to any part that only one rollout has, or be the id of a trace or conversation.
    """
    settings = settings_for(data_dir, store)
    setup_logging()

    async def main() -> None:
        async with open_store(settings) as opened:
            await show_rollout(opened, rollout_id, as_json=as_json, messages=messages, limit=limit)

    run_async(main)


async def show_rollout(
    store: Store,
    rollout_id: str,
    *,
    as_json: bool = False,
    messages: bool = False,
    limit: int = SHOWN_SPANS,
    console: Console | None = None,
) -> None:
    """Print every attempt of one rollout with its first `limit` spans (-1: all), and with `messages` the full text of its model calls.

    Raises NotFoundError if no rollout, or more than one, matches the id.
    """
    rollout = await one_rollout(store, rollout_id)
    found = await store.traces([rollout], deadline_seconds=0)
    page = await store.find_spans(SpanQuery(rollout_id=rollout.rollout_id, limit=limit))
    spans = list(page)
    attempts = await store.queue.query_attempts([rollout.rollout_id])
    evaluations = await store.evaluations(rollout.rollout_id)
    if as_json:
        verdicts = [verdict.model_dump() for verdict in found.verdicts.values()]
        content: dict[str, Any] = {
            "rollout": rollout.model_dump(mode="json", exclude={"token"}),
            "verdicts": verdicts,
            "feedback": [each.model_dump(mode="json") for each in evaluations],
            "spans_total": page.total,
        }
        print_json({**content, "spans": [span.model_dump(mode="json") for span in (expand_spans(spans) if messages else spans)]})
        return
    sampling = await _sampling_parameters(store, rollout)
    for attempt in attempts:
        own = [span for span in spans if span.attempt_id == attempt.attempt_id]
        verdict = found.verdicts.get((rollout.rollout_id, attempt.attempt_id))
        tree = attempt_tree(rollout, attempt, own, verdict, messages=messages, sampling=sampling, evaluations=evaluations)
        (console or open_console()).print(tree)
    if page.total > len(spans):
        click.echo(
            f"these are the first {len(spans)} of {page.total} spans: --limit -1 shows all, `agl-otel traces sql` counts and searches"
        )


async def _sampling_parameters(store: Store, rollout: Rollout) -> Mapping[str, Any]:
    """Return the sampling parameters of the rollout's LLM resource; empty if it has none."""
    update = await store.queue.get_resources(rollout.resources_id, version=rollout.resources_version) if rollout.resources_id else None
    llm = first_llm(update.resources) if update is not None else None
    return llm.sampling_parameters if llm is not None else {}


@traces.command()
@click.argument("query")
@data_dir_option
@store_option
@json_option
def sql(query: str, data_dir: Path | None, store: str | None, as_json: bool) -> None:
    """Run a read-only ClickHouse QUERY, e.g. "SELECT SpanName, uniqExact(TraceId, SpanId) FROM otel_traces GROUP BY 1".

    docs/traces.md has a query of rewards by day. A span that got its ids after it was stored has two rows: see there, too.
    """
    settings = settings_for(data_dir, store)
    setup_logging()

    async def main() -> None:
        async with open_store(settings) as opened:
            await opened.reader.barrier(patience_seconds=AWAY_SECONDS)
            rows = await opened.reader.query(query, own=False)
        if as_json:
            print_json(rows)
            return
        open_console().print(table_of(None, [*rows[0]], [[*map(str, row.values())] for row in rows]) if rows else "no rows")

    run_async(main)

"""`agl-otel backtest`: estimate from stored attempts what another policy would have earned."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from agl_otel.adapters.logged import LEFT_OUT, logged_of, weighable
from agl_otel.adapters.offpolicy import CANNOT_TELL, Estimate, Interval, Logged, estimate, joined
from agl_otel.adapters.sampling import token_temperatures
from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.export import ids_of_modes
from agl_otel.cli.output import counted
from agl_otel.cli.queue import must_exist, span_of_time
from agl_otel.cli.training_steps import run_id_of
from agl_otel.errors import DataError
from agl_otel.stack.sharing import open_store
from agl_otel.store import Store
from agl_otel.types import RolloutMode
from agl_otel.types.columns import Traces
from agl_otel.types.options import Finite, Pattern, Whole

if TYPE_CHECKING:
    from agl_otel.algorithms.grpo.policy import Policy

PAGE: Final = 500
EXIT_CODES: Final = {"better": 0, "worse": 3, "cannot_tell": 4}


@click.command()
@click.option("--policy", required=True, metavar="MODEL", help="The new policy: a folder with a model, or a model of the hub.")
@click.option(
    "--over",
    "modes",
    multiple=True,
    type=click.Choice(get_args(RolloutMode)),
    help="Only attempts of these modes (repeatable): production is adopted traffic.  [default: all but val and test]",
)
@click.option("--since", metavar="TIME", help="Only rollouts that began in this time, as in 7d.")
@click.option("--run", metavar="RUN", help="Only the rollouts of this run: its id, or its folder.")
@click.option("--rollout", "rollout_ids", multiple=True, metavar="ID", help="Only these (repeatable).")
@click.option("--agent-match", type=Pattern(), metavar="REGEX", help="The agents that the new policy is for.  [default: all]")
@click.option("--reward", metavar="NAME", help="The reward dimension that is the score.  [default: the primary one]")
@click.option("--reward-source", "sources", metavar="SOURCE", multiple=True, help="Whose rewards count (repeatable).  [default: all]")
@click.option("--by-step", is_flag=True, help="The score is the sum of an attempt's rewards, each weighed from its place in the attempt.")
@click.option("--clip", type=Finite(1), metavar="WEIGHT", help="The greatest weight of an attempt; the bias that it may cause is shown.")
@click.option("--seed", type=Whole(0), default=0, show_default=True, help="Of the bootstrap.")
@click.option("--device", default="cpu", show_default=True, help="Where the new policy is evaluated.")
@data_dir_option
@store_option
@json_option
def backtest(
    policy: str,
    rollout_ids: tuple[str, ...],
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
    seed: int,
    clip: float | None,
    device: str,
    **given: Any,
) -> None:
    """Estimate from stored attempts what another policy would have earned, without running an agent.

    Each reply that was logged is scored under the new policy, and each attempt weighs as many times as the new policy would have made its
    replies more often. Attempts with a reply whose distribution is not known in full are left out and counted. Where the new policy is too
    far from the logged one, the answer is that it cannot tell, and why.

    Exit codes, for CI: 0 better than what was logged, 3 worse, 4 cannot tell.
    """
    setup_logging()
    settings = settings_for(data_dir, store)
    since = 0.0 if given["since"] is None else time.time() - span_of_time(given["since"])
    run_id = None if given["run"] is None else run_id_of(given["run"])
    from transformers.utils.logging import disable_progress_bar

    from agl_otel.algorithms.grpo.policy import load_policy

    disable_progress_bar()
    loaded = load_policy(policy, device=device)

    async def main() -> tuple[Logged, Counter[str], Counter[str]]:
        async with open_store(settings) as opened:
            ids = await must_exist(opened.queue, rollout_ids, opened.reader)
            if not ids:
                ids, _ = await ids_of_modes(opened.queue, given["modes"], run_id, since=since)
            return await _read(opened, ids, loaded, given)

    logged, left_out, differing = run_async(main)
    if len(logged.task) < 2:
        raise DataError(f"{len(logged.task)} attempts count, and an estimate needs two. {'; '.join(_left_out(left_out, differing))}")
    found = estimate(logged, clip=clip, seed=seed)
    if as_json:
        print_json({**asdict(found), "verdict": found.verdict, "left_out": dict(left_out), "differing": dict(differing)})
    else:
        click.echo("\n".join([*_lines(found), *_left_out(left_out, differing)]))
    if code := EXIT_CODES[found.verdict]:
        raise SystemExit(code)


async def _read(store: Store, ids: Sequence[str], policy: Policy, given: dict[str, Any]) -> tuple[Logged, Counter[str], Counter[str]]:
    """Return the attempts that count, the number of those that do not by reason, and of calls by the field that is not known."""
    pages: list[Logged] = []
    left_out, differing = Counter[str](), Counter[str]()

    def convert(traces: Traces) -> None:
        from agl_otel.algorithms.backtest import logprobs_under

        found = weighable(traces, agent_match=given["agent_match"], reward_name=given["reward"])
        left_out.update(found.left_out)
        differing.update(found.batch.differing)
        if len(found.batch):
            new = logprobs_under(policy, found.batch, token_temperatures(traces.calls, found.batch.rows, default=1.0))
            pages.append(logged_of(traces, found.batch, new, by_step=given["by_step"], reward_name=given["reward"]))

    for start in range(0, len(ids), PAGE):
        traces = await store.traces(ids[start : start + PAGE], deadline_seconds=0, tree=given["by_step"])
        await asyncio.to_thread(convert, traces.trusting(given["sources"] or None))
    return joined(pages), left_out, differing


def _lines(found: Estimate) -> list[str]:
    texts = {"better": "better than", "worse": "worse than", "cannot_tell": "cannot tell whether it is better than"}
    return [
        f"{texts[found.verdict]} what was logged: {_shown(found.score)} against {found.logged:.4g}, a difference of {_shown(found.gain)}",
        f"{counted(found.attempts, 'attempt')} count, worth {found.effective:.0f} of the new policy's "
        f"(mean weight {found.mass:.3g}, tail {found.tail:.2f})",
        *([f"{counted(found.clipped, 'weight')} clipped: a bias of {found.clip_bias:.3g} at most"] if found.clipped else []),
        *(f"  {why}: {CANNOT_TELL[why]}" for why in found.doubts),
    ]


def _shown(interval: Interval) -> str:
    return f"{interval.value:.4g} [{interval.low:.4g}, {interval.high:.4g}]"


def _left_out(left_out: Counter[str], differing: Counter[str]) -> list[str]:
    fields = f" (calls by what differs: {', '.join(f'{name} {count}' for name, count in differing.most_common())})" if differing else ""
    return [
        *([f"{counted(left_out.total(), 'attempt')} left out{fields}:"] if left_out else []),
        *(f"  {count} {why}: {LEFT_OUT[why]}" for why, count in left_out.most_common()),
    ]

"""`agl-otel backtest`: estimate from stored attempts what another policy would have earned."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.logged import LEFT_OUT, logged_of, weighable
from agl_otel.adapters.offpolicy import CANNOT_TELL, Estimate, Interval, Logged, estimate, joined
from agl_otel.adapters.sampling import token_temperatures
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.model_access import check_not_proxy, checked_endpoint, key_env_option, key_of
from agl_otel.cli.output import counted
from agl_otel.cli.over import Over, over_options
from agl_otel.cli.queue import reading
from agl_otel.cli.selections import Taken, check_one_of, gone_lines, selection_option, taken_selection
from agl_otel.errors import DataError, UsageError
from agl_otel.jobs.model_client import Access, Bounds, ModelClient, Spend
from agl_otel.jobs.scoring import served_logprobs
from agl_otel.stack.sharing import open_store
from agl_otel.store import Store
from agl_otel.types.columns import Ragged
from agl_otel.types.options import Finite, Whole

PAGE: Final = 500
Score = Callable[[TrajectoryBatch, Ragged], Awaitable[NDArray[np.floating[Any]]]]
"""From trajectories, and the temperatures of the tokens that the model wrote, to the log-probs of these tokens under the new policy."""
EXIT_CODES: Final = {"better": 0, "worse": 3, "cannot_tell": 4}


@click.command()
@click.option("--policy", metavar="MODEL", help="The new policy: a folder with a model, or a model of the hub.")
@click.option(
    "--server", metavar="URL", help="Instead: its server, which scores prompts of token ids by /completions: http://host:8000/v1."
)
@click.option("--model", metavar="NAME", help="With --server: the new policy, by the name that its server has for it.")
@key_env_option
@click.option("--at-once", type=Whole(1, 256), default=16, show_default=True, help="With --server: requests in flight.")
@over_options
@selection_option
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
    policy: str | None,
    selection: str | None,
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
    replies more often. Attempts with a reply whose distribution is not known in full are left out and counted, and with --server those
    with one that was not sampled at temperature 1. Where the new policy is too far from the logged one, the answer is that it cannot tell,
    and why.

    Exit codes, for CI: 0 better than what was logged, 3 worse, 4 cannot tell.
    """
    setup_logging()
    check_one_of(selection, rollout=given["rollout_ids"], over=given["modes"], since=given["since"], run=given["run"])
    settings = settings_for(data_dir, store)
    over = Over.of(given)
    if (policy is None) == (given["server"] is None) or (policy is None) == (given["model"] is None):
        raise UsageError("give either --policy, or --server with --model")
    own = None if policy is None else _score_by(policy, device)

    async def main() -> tuple[tuple[Logged, Counter[str], Counter[str]], Taken | None]:
        async with open_store(settings) as opened:
            taken = await taken_selection(opened, selection) if selection is not None else None
            ids = taken.ids if taken is not None else await over.ids(opened)
            with reading("scoring attempts", silent=as_json) as on_read:
                if own is not None:
                    return await _read(opened, ids, own, given, on_read), taken
                async with _score_behind(opened, given) as served:
                    return await _read(opened, ids, served, given, on_read), taken

    (logged, left_out, differing), taken = run_async(main)
    selected = {} if taken is None else {"selection": taken.report()}
    if len(logged.task) < 2:
        raise DataError(f"{len(logged.task)} attempts count, and an estimate needs two. {'; '.join(_left_out(left_out, differing))}")
    found = estimate(logged, clip=clip, seed=seed)
    if as_json:
        print_json({**asdict(found), "verdict": found.verdict, "left_out": dict(left_out), "differing": dict(differing), **selected})
    else:
        click.echo("\n".join([*_lines(found), *(gone_lines(taken.report()) if taken else []), *_left_out(left_out, differing)]))
    if code := EXIT_CODES[found.verdict]:
        raise SystemExit(code)


def _score_by(policy: str, device: str) -> Score:
    """Load a policy, and return what scores replies under it."""
    from transformers.utils.logging import disable_progress_bar

    from agl_otel.algorithms.backtest import logprobs_under
    from agl_otel.algorithms.grpo.policy import load_policy

    disable_progress_bar()
    under = partial(logprobs_under, load_policy(policy, device=device))
    return lambda batch, temperatures: asyncio.to_thread(under, batch, temperatures)


@asynccontextmanager
async def _score_behind(store: Store, given: dict[str, Any]) -> AsyncGenerator[Score]:
    """Return what scores replies under the policy of a server."""
    access = Access(given["model"], checked_endpoint("--server", given["server"]), key_of(given["key_env"]), given["key_env"])
    check_not_proxy(store, "--server", access.endpoint, "the back-test's")
    async with ModelClient(access, Spend(Bounds())) as model:
        yield lambda batch, _: served_logprobs(model, batch, at_once=given["at_once"])


async def _read(
    store: Store, ids: Sequence[str], score: Score, given: dict[str, Any], on_read: Callable[[int, int], None]
) -> tuple[Logged, Counter[str], Counter[str]]:
    """Return the attempts that count, the number of those that do not by reason, and of calls by the field that is not known."""
    pages: list[Logged] = []
    left_out, differing = Counter[str](), Counter[str]()
    weigh = partial(weighable, agent_match=given["agent_match"], reward_name=given["reward"], at_one=given["server"] is not None)
    for start in range(0, len(ids), PAGE):
        traces = await store.traces(ids[start : start + PAGE], deadline_seconds=0, tree=given["by_step"])
        traces = traces.trusting(given["sources"] or None)
        found = await asyncio.to_thread(weigh, traces)
        left_out.update(found.left_out)
        differing.update(found.batch.differing)
        if len(found.batch):
            new = await score(found.batch, token_temperatures(traces.calls, found.batch.rows, default=1.0))
            pages.append(logged_of(traces, found.batch, new, by_step=given["by_step"], reward_name=given["reward"]))
        on_read(min(start + PAGE, len(ids)), len(ids))
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

"""`agl-otel replay`: give another policy the prompts of stored attempts, and compare its tool calls with the recorded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import click

from agl_otel.adapters.replay import FATES, NOT_REPLAYED, Tally
from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.model_access import check_not_proxy, checked_endpoint, key_env_option, key_of
from agl_otel.cli.output import counted
from agl_otel.cli.over import Over, over_options
from agl_otel.jobs.model_client import Access, Bounds, ModelClient, Spend
from agl_otel.jobs.replay import Replay
from agl_otel.stack.sharing import open_store
from agl_otel.text import printable
from agl_otel.types.options import Finite, Whole

SHOWN: Final = 10
"""Tool calls that were not recorded, the most frequent ones."""
Verdict = Literal["same", "regressed", "cannot_tell"]
EXIT_CODES: Final[dict[Verdict, int]] = {"same": 0, "regressed": 3, "cannot_tell": 4}


@click.command()
@click.option("--server", required=True, metavar="URL", help="The new policy's server, with OpenAI's API: http://host:8000/v1.")
@click.option("--model", required=True, help="The new policy, by the name that its server has for it.")
@key_env_option
@over_options
@click.option(
    "--misses",
    type=Finite(0, 1),
    default=0.0,
    show_default=True,
    metavar="SHARE",
    help="How many of the model calls with tools may differ from the recorded ones.",
)
@click.option("--temperature", type=Finite(0, 2), default=0.0, show_default=True, help="Of the new policy's replies.")
@click.option("--seed", type=Whole(0), default=0, show_default=True, help="Sent with every request.")
@click.option("--max-answer-tokens", type=Whole(1), default=1024, show_default=True, help="Of one reply, with its reasoning.")
@click.option("--at-once", type=Whole(1, 256), default=16, show_default=True, help="Attempts that are replayed at a time.")
@data_dir_option
@store_option
@json_option
def replay(
    server: str,
    model: str,
    misses: float,
    at_once: int,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Give a policy the prompts of stored attempts again, and compare the tool calls of its replies with the recorded ones.

    No agent runs and no tool is called: each prompt holds what tools returned then. It is a regression check, not an estimate of a score.
    The digest is that of what became of every tool call: two replays with the same one made the same calls.

    Exit codes, for CI: 0 the same but for a share of --misses at most, 3 more differ, 4 nothing to compare.
    """
    setup_logging()
    access = Access(
        model,
        checked_endpoint("--server", server),
        key_of(given["key_env"]),
        given["key_env"],
        given["temperature"],
        given["max_answer_tokens"],
    )
    settings = settings_for(data_dir, store)
    over = Over.of(given)

    async def main() -> Tally:
        async with open_store(settings) as opened:
            ids = await over.ids(opened)
            check_not_proxy(opened, "--server", server, "the replay's")
            async with ModelClient(access, Spend(Bounds())) as asked:
                return await Replay(opened, asked, seed=given["seed"], agent_match=given["agent_match"]).run(ids, at_once=at_once)

    tally = run_async(main)
    verdict = verdict_of(tally, misses)
    print_json(_report(tally, verdict)) if as_json else click.echo("\n".join(_lines(tally, verdict, misses)))
    if code := EXIT_CODES[verdict]:
        raise SystemExit(code)


def verdict_of(tally: Tally, misses: float) -> Verdict:
    """Return whether at most a share `misses` of the compared model calls differs."""
    if not tally.compared:
        return "cannot_tell"
    return "same" if tally.share <= misses else "regressed"


def _report(tally: Tally, verdict: Verdict) -> dict[str, Any]:
    return {
        "verdict": verdict,
        "attempts": tally.attempts,
        "calls": tally.calls,
        "compared": tally.compared,
        "differing": tally.differing,
        "share": tally.share if tally.compared else None,
        "text_instead": tally.text_instead,
        "refused": tally.refused,
        "refusal": tally.refusal,
        "tools": {name: {fate: found[fate] for fate in FATES} for name, found in sorted(tally.tools.items())},
        "misses": [{"name": call.name, "arguments": call.arguments, "count": count} for call, count in _most(tally)],
        "left_out": dict(tally.left_out),
        "digest": tally.digest,
    }


def _most(tally: Tally) -> list[tuple[Any, int]]:
    """Return the most frequent misses; of equal ones the first by name and arguments, whatever came first."""
    return sorted(tally.misses.items(), key=lambda each: (-each[1], each[0]))[:SHOWN]


def _lines(tally: Tally, verdict: Verdict, misses: float) -> list[str]:
    compared = counted(tally.compared, "model call")
    of = f"{tally.differing} of {compared} with tools differ, a share of {tally.share:.4g} where {misses:.4g} may"
    head = {
        "same": f"the same: {of}",
        "regressed": f"regressed: {of}",
        "cannot_tell": "cannot tell: no model call has tools, then or now",
    }
    tools = sorted(tally.tools.items())
    more = len(tally.misses) - SHOWN
    return [
        head[verdict],
        f"{counted(tally.attempts, 'attempt')}, {counted(tally.calls, 'model call')} replayed",
        *([f"{counted(tally.text_instead, 'model call')} answered with a text instead of tool calls"] if tally.text_instead else []),
        *([f"{counted(tally.refused, 'prompt')} refused by the server: {printable(tally.refusal)}"] if tally.refused else []),
        *(
            f"  {printable(name)}: " + ", ".join(f"{found[fate]} {text}" for fate, text in FATES.items() if found[fate])
            for name, found in tools
        ),
        *([f"not recorded, the most frequent of {len(tally.misses)}:"] if tally.misses else []),
        *(f"  {count} {printable(str(call))}" for call, count in _most(tally)),
        *([f"  … and {more} more"] if more > 0 else []),
        *([f"{counted(tally.left_out.total(), 'model call')} not replayed:"] if tally.left_out else []),
        *(f"  {count} {why}: {NOT_REPLAYED[why]}" for why, count in tally.left_out.most_common()),
        f"digest {tally.digest}",
    ]

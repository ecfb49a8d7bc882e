"""`agl-otel feedback`: reward, comment or correct what an agent did, after the fact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import click

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, settings_for, setup_logging, store_option
from agl_otel.cli.output import counted
from agl_otel.cli.rollouts import one_rollout
from agl_otel.errors import AglError, UsageError
from agl_otel.stack.sharing import open_store
from agl_otel.store import Store
from agl_otel.types.feedback import NAME, Feedback, GivenFeedback


class _Feedback(click.Command):
    """Takes a negative number as the value that it is, and not as an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes = {name for option in self.params if isinstance(option, click.Option) and not option.is_flag for name in option.opts}
        after = zip(["", *args], args, strict=False)
        values = [place for place, (before, each) in enumerate(after) if each[:1] == "-" and _is_number(each) and before not in takes]
        if "--" not in args:
            args = [*(each for place, each in enumerate(args) if place not in values), "--", *(args[place] for place in values)]
        return super().parse_args(ctx, args)


@click.command(cls=_Feedback)
@click.argument("about", nargs=-1, metavar="[ROLLOUT_ID] [VALUE]")
@click.option("--attempt", "attempt_id", metavar="ID", help="The attempt of the rollout.  [default: the latest]")
@click.option("--response", "response_id", metavar="ID", help="In place of ROLLOUT_ID: the model call with this response id.")
@click.option("--conversation", "conversation_id", metavar="ID", help="In place of ROLLOUT_ID: this conversation (gen_ai.conversation.id).")
@click.option("--label", default="", help="In place of VALUE: pass, fail, … count as 1 and 0; other labels are kept, and are no reward.")
@click.option("--text", default="", help="An explanation.")
@click.option("--correction", default="", metavar="TEXT", help="What the agent should have answered.")
@click.option("--name", default=NAME, show_default=True, help="The reward's name, by which training and exports choose.")
@click.option("--source", default=NAME, show_default=True, help="Who gives it, by which training chooses whom it trusts.")
@click.option("--rubric", default="", help="By which rules, with their version.")
@click.option("--id", "given_id", metavar="ID", help="Names it: the same id for the same attempt is stored once.  [default: a new one]")
@click.option("--from", "lines", type=click.File("r", encoding="utf-8"), help="A file of JSON lines (-: stdin), each one feedback.")
@data_dir_option
@store_option
@json_option
def feedback(
    about: Sequence[str],
    attempt_id: str | None,
    given_id: str | None,
    lines: IO[str] | None,
    data_dir: Path | None,
    store: str | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Reward, comment or correct what an agent did, also long after it has ended. VALUE is a number, true or false.

    Of several rewards of an attempt the last counts, but not before one that its runner gave. ROLLOUT_ID may be shortened to any part that
    only one rollout has, or be the id of a trace. A line of --from is an object with the fields of REST's feedback (docs/late-rewards.md).
    Every line is checked before one is sent; what has an `id` may be sent again, and is stored once.
    """
    if lines is not None:
        if about or attempt_id or any(value not in ("", None, NAME) for value in fields.values()):
            raise UsageError("--from takes all of it from the file: leave out the rest")
        all_given = {number: Feedback.of(text, f"line {number}") for number, text in enumerate(lines, 1) if text.strip()}
    else:
        rest = [*about]
        ids = {name: value for name in ("response_id", "conversation_id") if (value := fields.pop(name)) is not None}
        ids |= {} if ids or not rest else {"rollout_id": rest.pop(0)}
        if len(rest) > 1:
            raise UsageError(f"there is more than one value: {', '.join(rest)}")
        more = {"attempt_id": attempt_id, "id": given_id, "value": _number(rest[0]) if rest else None}
        one = Feedback.of({**ids, **fields, **{name: value for name, value in more.items() if value is not None}}, "the feedback")
        all_given = {1: one}
    settings = settings_for(data_dir, store)
    setup_logging()

    async def main() -> None:
        async with open_store(settings) as opened:
            for stored, (number, each) in enumerate(all_given.items()):
                try:
                    made = await _send(opened, each, shortened=lines is None)
                except AglError as error:
                    if lines is None:
                        raise
                    before = f"{counted(stored, 'line')} before it {'is' if stored == 1 else 'are'} stored"
                    raise type(error)(f"line {number}: {error}. {before}: correct it, and send the lines from it on") from error
                if as_json:
                    print_json({**made.model_dump(mode="json"), "number": stored})
                elif lines is None:
                    click.echo(_told(made))
            if lines is not None and not as_json:
                click.echo(f"{len(all_given)} stored")

    run_async(main)


async def _send(store: Store, given: Feedback, *, shortened: bool) -> GivenFeedback:
    if shortened and given.rollout_id is not None:
        given = given.model_copy(update={"rollout_id": (await one_rollout(store, given.rollout_id)).rollout_id})
    return await store.add_feedback(given)


def _told(made: GivenFeedback) -> str:
    if not made.is_new:
        return f"{made.id} was stored before"
    if made.rollout_id is None:
        return f"{made.id} is stored; the collector finds its attempt within half a minute, if its model call is stored"
    return f"{made.id} is stored for attempt {made.attempt_id} of {made.rollout_id}"


def _number(text: str) -> float | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not _is_number(text):
        raise UsageError(f"the value is {text[:40]!r}: a number, true or false; for words use --label or --text")
    return float(text)


def _is_number(text: str) -> bool:
    """Whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True

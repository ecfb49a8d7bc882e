"""Shared by commands that compare another policy with stored attempts: the options that choose them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

import click

from agl_otel.cli.common import Decorator
from agl_otel.cli.export import ids_of_modes
from agl_otel.cli.queue import must_exist, span_of_time
from agl_otel.cli.training_steps import run_id_of
from agl_otel.store import Store
from agl_otel.types import RolloutMode
from agl_otel.types.options import Pattern

_OPTIONS: Final[Sequence[Decorator]] = (
    click.option(
        "--over",
        "modes",
        multiple=True,
        type=click.Choice(get_args(RolloutMode)),
        help="Only attempts of these modes (repeatable): production is adopted traffic.  [default: all but val and test]",
    ),
    click.option("--since", metavar="TIME", help="Only rollouts that began in this time, as in 7d."),
    click.option("--run", metavar="RUN", help="Only the rollouts of this run: its id, or its folder."),
    click.option("--rollout", "rollout_ids", multiple=True, metavar="ID", help="Only these (repeatable)."),
    click.option("--agent-match", type=Pattern(), metavar="REGEX", help="The agents that the new policy is for.  [default: all]"),
)


def over_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of Over, and --agent-match."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class Over(NamedTuple):
    """Which rollouts a command is over."""

    rollout_ids: Sequence[str]
    modes: Sequence[RolloutMode]
    since: float
    """Unix seconds."""
    run_id: str | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Over:
        """Read the options. Raises UsageError."""
        since = 0.0 if given["since"] is None else time.time() - span_of_time(given["since"])
        return cls(given["rollout_ids"], given["modes"], since, None if given["run"] is None else run_id_of(given["run"]))

    async def ids(self, store: Store) -> Sequence[str]:
        """Return the ids: those that are named, else those of the modes. Raises NotFoundError."""
        if self.rollout_ids:
            return await must_exist(store.queue, self.rollout_ids, store.reader)
        return (await ids_of_modes(store.queue, self.modes, self.run_id, since=self.since))[0]

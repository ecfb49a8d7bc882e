"""`agl-otel token`: make a token that gives access to some services for a limited time."""

from __future__ import annotations

import time
from typing import Final

import click
from click.core import ParameterSource

from agl_otel.cli.common import json_option, print_json
from agl_otel.errors import UsageError
from agl_otel.net.auth import NO_TOKEN, SCOPES, Subject, feedback_key, ingest_key, scoped_token
from agl_otel.settings import Settings
from agl_otel.types.options import Finite

HOURS: Final = 24.0
OTLP: Final = "otlp"
FEEDBACK: Final = "feedback"


@click.command()
@click.option(
    "--for",
    "scopes",
    multiple=True,
    required=True,
    type=click.Choice([*SCOPES, OTLP]),
    help="A service that it gives access to (repeatable).",
)
@click.option("--conversation", metavar="ID", help="With --for feedback: of this conversation only.")
@click.option("--response", metavar="ID", help="With --for feedback: of this model call only.")
@click.option("--hours", default=HOURS, show_default=True, type=Finite(min=0, min_open=True), help="How long it is valid.")
@json_option
@click.pass_context
def token(
    context: click.Context, scopes: tuple[str, ...], conversation: str | None, response: str | None, hours: float, as_json: bool
) -> None:
    """Make a token that gives access to some services of the stack for a limited time.

    It is derived from AGL_TOKEN, so every service accepts it at once. Give it to people and programs that only read (a browser, Grafana,
    Prometheus); runners, trainers and services need AGL_TOKEN itself. It cannot be revoked before it expires, except by changing AGL_TOKEN.

    `--for otlp` prints a key that may only send telemetry, of any rollout, for HTTP agents that do not run under the hook:
    OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer KEY". It is valid as long as AGL_TOKEN.

    `--for feedback` may only send feedback. With --conversation or --response it may send it on that one only, and be given to the browser
    of the user who is to rate it.
    """
    stack_token = Settings.load().token.get_secret_value()
    expires_at: int | None = int(time.time() + hours * 3600)
    if OTLP in scopes:
        if {*scopes} != {OTLP} or context.get_parameter_source("hours") is ParameterSource.COMMANDLINE:
            raise UsageError("--for otlp makes another kind of key, which is valid as long as AGL_TOKEN: use it alone, without --hours")
        if not stack_token:
            raise UsageError(NO_TOKEN)
        made, expires_at = ingest_key(stack_token), None
    elif conversation or response:
        if {*scopes} != {FEEDBACK} or (conversation and response):
            raise UsageError("--conversation and --response belong to --for feedback: use one of them, with that service alone")
        subject = Subject("conversation", conversation) if conversation else Subject("response", response or "")
        made = feedback_key(stack_token, subject, expires_at)
    else:
        made = scoped_token(stack_token, scopes, expires_at)
    if as_json:
        print_json({"token": made, "for": sorted(scopes), "expires_at": expires_at})
    else:
        click.echo(made)

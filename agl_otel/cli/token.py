"""`agl-otel token`: a token that opens some services for a while."""

from __future__ import annotations

import time
from typing import Final

import click
from click.core import ParameterSource

from agl_otel.cli.common import json_option, print_json
from agl_otel.errors import UsageError
from agl_otel.net.auth import NO_TOKEN, SCOPES, ingest_key, scoped_token
from agl_otel.settings import Settings
from agl_otel.types.options import Finite

HOURS: Final = 24.0
OTLP: Final = "otlp"


@click.command()
@click.option(
    "--for", "scopes", multiple=True, required=True, type=click.Choice([*SCOPES, OTLP]), help="A service that it opens (repeatable)."
)
@click.option("--hours", default=HOURS, show_default=True, type=Finite(min=0, min_open=True), help="How long it holds.")
@json_option
@click.pass_context
def token(context: click.Context, scopes: tuple[str, ...], hours: float, as_json: bool) -> None:
    """Make a token that opens some services of the stack for a while.

    It is made from AGL_TOKEN, so every service knows it at once. Give it to people and programs that look (a browser, Grafana,
    Prometheus); runners, trainers and services need AGL_TOKEN itself. It cannot be taken back before its time but by another AGL_TOKEN.

    `--for otlp` prints the key that sends telemetry of every rollout and does nothing else, for HTTP agents that do not run under the
    hook: OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer KEY". It holds as long as AGL_TOKEN.
    """
    stack_token = Settings.load().token.get_secret_value()
    expires_at: int | None = int(time.time() + hours * 3600)
    if OTLP in scopes:
        if {*scopes} != {OTLP} or context.get_parameter_source("hours") is ParameterSource.COMMANDLINE:
            raise UsageError("--for otlp gives another kind of key, which holds as long as AGL_TOKEN: ask for it alone, without --hours")
        if not stack_token:
            raise UsageError(NO_TOKEN)
        made, expires_at = ingest_key(stack_token), None
    else:
        made = scoped_token(stack_token, scopes, expires_at)
    if as_json:
        print_json({"token": made, "for": sorted(scopes), "expires_at": expires_at})
    else:
        click.echo(made)

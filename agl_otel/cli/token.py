"""`agl-otel token`: a token that opens some services for a while."""

from __future__ import annotations

import time
from typing import Final

import click

from agl_otel.cli.common import json_option, print_json
from agl_otel.scoped import SCOPES, scoped_token
from agl_otel.settings import Settings

HOURS: Final = 24.0


@click.command()
@click.option("--for", "scopes", multiple=True, required=True, type=click.Choice([*SCOPES]), help="A service that it opens (repeatable).")
@click.option("--hours", default=HOURS, show_default=True, type=click.FloatRange(min=0, min_open=True), help="How long it holds.")
@json_option
def token(scopes: tuple[str, ...], hours: float, as_json: bool) -> None:
    """Make a token that opens some services of the stack for a while.

    It is made from AGL_TOKEN, so every service knows it at once. Give it to people and programs that look (a browser, Grafana,
    Prometheus); runners, trainers and services need AGL_TOKEN itself. It cannot be taken back before its time but by another AGL_TOKEN.
    """
    expires_at = int(time.time() + hours * 3600)
    made = scoped_token(Settings.load().token.get_secret_value(), scopes, expires_at)
    if as_json:
        print_json({"token": made, "for": sorted(scopes), "expires_at": expires_at})
    else:
        click.echo(made)

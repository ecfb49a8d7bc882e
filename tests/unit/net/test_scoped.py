from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from agl_otel.cli import cli
from agl_otel.errors import UsageError
from agl_otel.net.ingest import ingest_key
from agl_otel.net.scoped import SCOPES, refusal, scoped_token
from agl_otel.proxy.keys import attempt_key, is_ours, is_trusted

TOKEN = "the stack's own"


def test_a_token_opens_what_it_is_for_until_its_time_is_over() -> None:
    made = scoped_token(TOKEN, ["web", "clickhouse"], 1000.0)
    for scope in SCOPES:
        assert (refusal(TOKEN, made, scope, now=999.0) is None) == (scope in ("web", "clickhouse"))
        assert refusal(TOKEN, TOKEN, scope, now=1e10) is None
    assert refusal(TOKEN, made, "queue", now=999.0) == "this token is for clickhouse, web and not for queue"
    assert "expired at 1970-01-01 00:16:40 UTC" in (refusal(TOKEN, made, "web", now=1000.0) or "")
    assert TOKEN not in made


@pytest.mark.parametrize("change", [
    lambda made: made.replace("-1000-", "-9000-"), lambda made: made.replace("web", "queue"), lambda made: made[:-1] + "g",
    lambda made: "", lambda made: "aglt", lambda made: "aglt-web-1000-", lambda made: "aglt---", lambda made: made + "\udcff",
])  # fmt: skip
def test_what_was_changed_or_made_up_opens_nothing(change: object) -> None:
    assert callable(change)
    given = str(change(scoped_token(TOKEN, ["web"], 1000.0)))
    assert refusal(TOKEN, given, "web", now=1.0) == ""
    assert refusal("another stack's", scoped_token(TOKEN, ["web"], 1000.0), "web", now=1.0) == ""


def test_the_proxy_knows_them_and_shows_them_to_no_provider() -> None:
    made = scoped_token(TOKEN, ["proxy"], 1e11)
    assert is_ours(made) and is_trusted(TOKEN, made) and not is_trusted(TOKEN, scoped_token(TOKEN, ["web"], 1e11))


@pytest.mark.parametrize(
    ("given", "scopes", "says"), [("", ["web"], "AGL_TOKEN"), (TOKEN, [], "opens nothing"), (TOKEN, ["all"], "no service all")]
)
def test_none_is_made_of_nothing(given: str, scopes: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        scoped_token(given, scopes, 1000.0)


def test_the_key_for_telemetry_is_printed_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", TOKEN)
    printed = CliRunner().invoke(cli, ["token", "--for", "otlp"])
    assert (printed.exit_code, printed.output.strip()) == (0, ingest_key(TOKEN))
    assert json.loads(CliRunner().invoke(cli, ["token", "--for", "otlp", "--json"]).output)["expires_at"] is None
    assert all(refusal(TOKEN, ingest_key(TOKEN), scope, now=1.0) == "" for scope in SCOPES)
    for more in (["--for", "web"], ["--hours", "1"]):
        assert isinstance(CliRunner().invoke(cli, ["token", "--for", "otlp", *more]).exception, UsageError)
    monkeypatch.setenv("AGL_TOKEN", "")
    assert isinstance(CliRunner().invoke(cli, ["token", "--for", "otlp"]).exception, UsageError)


def test_the_key_of_an_attempt_is_no_token() -> None:
    """Whatever ids it has: both are signed with the stack's token."""
    signature = attempt_key(TOKEN, "aglt-web-99999999999", "at").rpartition("-")[2]
    assert refusal(TOKEN, f"aglt-web-99999999999/at-{signature}", "web", now=1.0) == ""

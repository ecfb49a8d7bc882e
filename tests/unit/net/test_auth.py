from __future__ import annotations

import json
import socket

import pytest
from click.testing import CliRunner
from pydantic import SecretStr

from agl_otel.cli import cli
from agl_otel.errors import UsageError
from agl_otel.net.auth import (
    SCOPES,
    WEB,
    BrowserAccess,
    admission,
    attempt_ingest_key,
    attempt_key,
    ingest_key,
    is_loopback,
    is_ours,
    is_token_itself,
    is_trusted,
    may_call,
    own_names,
    refusal,
    scoped_token,
    shared_key,
    shown_to_sql,
)
from agl_otel.settings import Settings

TOKEN = "the stack's own"


def test_a_scoped_token_opens_its_services_until_it_expires() -> None:
    made = scoped_token(TOKEN, ["web", "clickhouse"], 1000.0)
    for scope in SCOPES:
        assert (refusal(TOKEN, made, scope, now=999.0) is None) == (scope in ("web", "clickhouse"))
        assert refusal(TOKEN, TOKEN, scope, now=1e10) is None
    assert refusal(TOKEN, made, "queue", now=999.0) == "this token is for clickhouse, web and not for queue"
    assert "expired at 1970-01-01 00:16:40 UTC" in (refusal(TOKEN, made, "web", now=1000.0) or "")
    assert TOKEN not in made


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_case_of_the_scheme_does_not_matter(scheme: str) -> None:
    headers = {"Authorization": f"{scheme} {TOKEN}"}
    assert WEB.refusal(TOKEN, headers) is None
    assert is_token_itself(headers["Authorization"], TOKEN) and not is_token_itself(f"{scheme} {ingest_key(TOKEN)}", TOKEN)
    assert TOKEN in shown_to_sql(headers, {})
    assert admission(TOKEN, headers["Authorization"]).refusal is None
    assert admission(TOKEN, f"{scheme} {attempt_ingest_key(TOKEN, 'ro-1', 'at-1')}", sending=True).sender.bound == ("ro-1", "at-1")
    assert WEB.refusal(TOKEN, {"Authorization": f"Basic {TOKEN}"}) is not None


@pytest.mark.parametrize("change", [
    lambda made: made.replace("-1000-", "-9000-"), lambda made: made.replace("web", "queue"), lambda made: made[:-1] + "g",
    lambda made: "", lambda made: "aglt", lambda made: "aglt-web-1000-", lambda made: "aglt---", lambda made: made + "\udcff",
])  # fmt: skip
def test_altered_or_invented_tokens_open_nothing(change: object) -> None:
    assert callable(change)
    given = str(change(scoped_token(TOKEN, ["web"], 1000.0)))
    assert refusal(TOKEN, given, "web", now=1.0) == ""
    assert refusal("another stack's", scoped_token(TOKEN, ["web"], 1000.0), "web", now=1.0) == ""


SENDERS = "`agl-otel token --for otlp` prints"
KEY = attempt_ingest_key(TOKEN, "ro-1", "at-1")


@pytest.mark.parametrize(("shown", "says"), [
    ("", "no token was sent"), ("Bearer", "no token was sent"), ("Bearer ", "no token was sent"),
    ("Bearer guess", "no token or key of this stack"), (f"Bearer {KEY[:-1]}x", "no token or key of this stack"),
    (f"Bearer {TOKEN}x", "no token or key of this stack"), (f"bearer {ingest_key('another')}", "no token or key of this stack"),
    (f"Bearer%20{KEY}", "%20 for the space"), (f"Basic {TOKEN}", "does not begin with `Bearer `"), (KEY, "does not begin with `Bearer `"),
])  # fmt: skip
def test_a_collector_says_what_is_wrong_with_a_sender_and_what_to_send(shown: str, says: str) -> None:
    why = admission(TOKEN, shown, sending=True).refusal or ""
    assert says in why and SENDERS in why and TOKEN not in why
    why = admission(TOKEN, shown).refusal or ""
    assert says in why
    assert "the stack's AGL_TOKEN" in why and SENDERS not in why


def test_a_refusal_does_not_tell_how_near_a_token_was() -> None:
    made = scoped_token(TOKEN, ["collector"], 1000.0)
    tampered = (made[:-1] + "g", made.replace("1000", "9000"), KEY[:-1] + "g", KEY.replace("ro-1", "ro-2"), TOKEN[:-1], "x")
    assert len({admission(TOKEN, f"Bearer {given}", sending=True).refusal for given in tampered}) == 1
    assert len({admission(TOKEN, f"Bearer {given}").refusal for given in tampered}) == 1


def test_a_key_on_a_path_that_it_does_not_open_is_told_so() -> None:
    assert "can only send telemetry" in (admission(TOKEN, f"Bearer {KEY}").refusal or "")
    assert "for web and not for collector" in (admission(TOKEN, f"Bearer {scoped_token(TOKEN, ['web'], 1e11)}").refusal or "")


def test_the_proxy_recognises_our_keys_and_sends_none_to_a_provider() -> None:
    made = scoped_token(TOKEN, ["proxy"], 1e11)
    assert is_ours(made) and is_trusted(TOKEN, made) and not is_trusted(TOKEN, scoped_token(TOKEN, ["web"], 1e11))


@pytest.mark.parametrize(
    ("given", "scopes", "says"), [("", ["web"], "AGL_TOKEN"), (TOKEN, [], "opens nothing"), (TOKEN, ["all"], "no service all")]
)
def test_no_token_is_made_without_a_stack_token_or_scope(given: str, scopes: list[str], says: str) -> None:
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
    """With any ids: both are signed with the stack's token."""
    signature = attempt_key(TOKEN, "aglt-web-99999999999", "at").rpartition("-")[2]
    assert refusal(TOKEN, f"aglt-web-99999999999/at-{signature}", "web", now=1.0) == ""


def test_a_key_opens_its_own_attempt_only() -> None:
    key = attempt_key("secret", "ro-1", "at-1")
    assert may_call("secret", key, "ro-1", "at-1") and is_ours(key) and "secret" not in key
    assert not any(may_call("secret", key, *other) for other in (("ro-1", "at-2"), ("ro-2", "at-1")))
    assert not may_call("other", key, "ro-1", "at-1") and not is_trusted("secret", key)


def test_the_shared_key_and_the_token_open_all() -> None:
    assert all(may_call("secret", key, "ro-1", "at-1") and is_trusted("secret", key) for key in (shared_key("secret"), "secret"))
    assert not may_call("secret", "", "ro-1", "at-1") and not is_trusted("secret", "ümlaut")


def test_without_a_token_no_key_is_asked_for() -> None:
    assert may_call("", "anything", "ro-1", "at-1") and is_trusted("", "")


def test_host_names_are_checked_on_loopback_only() -> None:
    for host in ("127.0.0.1", "127.0.1.1", "::1", "localhost"):
        assert is_loopback(host) and own_names(Settings(host=host, allowed_hosts="a, B")) == {host, "a", "b"}
    for host in ("0.0.0.0", "::", "192.0.2.7", "no-such-host.invalid", ""):
        assert not is_loopback(host) and own_names(Settings(host=host)) is None
    assert own_names(Settings(allowed_hosts="*")) is None and own_names(Settings(token=SecretStr("t"))) is None


def test_a_host_name_that_resolves_to_loopback_is_loopback() -> None:
    name = socket.gethostname()
    try:
        found = {each[4][0] for each in socket.getaddrinfo(name, None)}
    except OSError as error:
        pytest.skip(f"this machine's name leads nowhere: {error}")
    if not all(str(address).startswith(("127.", "::1")) for address in found):
        pytest.skip(f"this machine's name leads to {found}, not to its loopback")
    assert own_names(Settings(host=name.upper())) == {name.lower()}


@pytest.mark.parametrize("origin", ["http://[", "null", "http://evil.example", "http://127.0.0.1:80@evil.example", "127.0.0.1:80"])
def test_a_page_of_another_origin_may_not_post(origin: str) -> None:
    assert BrowserAccess().refusal("POST", {"Host": "127.0.0.1:80", "Origin": origin})
    assert BrowserAccess().refusal("POST", {"Host": "127.0.0.1:80", "Origin": "http://127.0.0.1:80"}) is None

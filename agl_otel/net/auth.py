"""Access control of all ports of a stack: tokens and keys, host names, and origins of web pages.

All keys are derived from the stack's token (HMAC-SHA256), so none are stored, and the token cannot be computed from them:

| shown | opens |
|---|---|
| the stack's token | everything |
| an expiring token for some services (`scoped_token`) | those services; for viewers: a browser, Grafana, Prometheus |
| an expiring key of one conversation or response (`feedback_key`) | sending feedback on it; for a browser of the agent's users |
| the telemetry key of an attempt (`attempt_ingest_key`) | sending telemetry, all of it assigned to that attempt |
| the telemetry key of no attempt (`ingest_key`) | sending telemetry of any rollout; for services that cannot have an attempt's key |
| the model key of an attempt (`attempt_key`) | that attempt's model calls, by its path at the proxy |
| the shared model key (`shared_key`) | model calls of every attempt and of none; for a process that runs many attempts (function agents) |
| the key of model servers (`model_server_key`) | model servers that a training run starts on a cluster; the proxy sends it |
| another key | a model call of no attempt, where `AGL_PROXY_OWN_KEYS` allows it |
| nothing | the status in /health, /ping, the files of the dashboard |

A stack without a token requires none; on loopback its HTTP ports then accept only their own host names (`BrowserAccess`), against web pages
whose name resolves to this machine (DNS rebinding). Of several Authorization headers the first counts.

The Go collector makes and checks the same telemetry keys (collector/otelcol/agentlightning; golden vectors in collector/conformance/keys).
Refusals are texts; each port chooses their form. TLS and client certificates: tls.py and http_server.py. Only `is_loopback` does I/O.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import ipaddress
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast
from urllib.parse import urlsplit

from agl_otel.errors import SettingsError, UsageError
from agl_otel_hook.conventions import BOUND_PREFIX, named_by

if TYPE_CHECKING:
    from agl_otel.settings import Settings

SCOPES: Final = {
    "queue": "the queue's gRPC",
    "collector": "the collector's ports: sends, deletes, maintains",
    "clickhouse": "read-only SQL",
    "proxy": "model calls of no attempt, and what steers the proxy",
    "models": "model calls of no attempt, and nothing else",
    "web": "REST, dashboard, Jaeger's APIs",
    "view": "the same as far as it changes nothing: the whole dashboard",
    "metrics": "/metrics of every service, and nothing else",
    "feedback": "sending feedback to REST, and nothing else",
    "prompts": "which prompts a conversation gets, by REST, and nothing else",
}
"""{scope of a token: what it opens}."""
NO_TOKEN: Final = "no token was made, because the stack has none: set AGL_TOKEN to it"
NO_CERTIFICATE: Final = "this port wants a client certificate of the authority in AGL_TLS_CLIENT_CA"
OWN_NEEDED: Final = "this call is for the stack's own services: it wants the stack's token itself (AGL_TOKEN), and not one made from it"
NEEDED: Final = "a bearer token is needed: set AGL_TOKEN to the stack's token"
SCOPED_PREFIX: Final = "aglt"
FEEDBACK_PREFIX: Final = "aglf"
KEY_PREFIX: Final = "agl-"
"""Prefix of keys for telemetry and model calls; no provider's key has it."""
SIGNATURE_DIGITS: Final = 40  # hexadecimal
_BEARER: Final = "bearer "
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_OTHER_SITES: Final = frozenset({"cross-site", "same-site"})  # values of Sec-Fetch-Site; another port of this machine is the same site


# --- tokens and keys


def scoped_token(token: str, scopes: Sequence[str], expires_at: float) -> str:
    """Make a token for these services until `expires_at` (Unix seconds). Raises UsageError without a token or for unknown services."""
    if not token:
        raise UsageError(NO_TOKEN)
    unknown = sorted({*scopes} - {*SCOPES})
    if unknown or not scopes:
        what = f"there is no service {', '.join(unknown)}" if scopes else "it opens nothing"
        raise UsageError(f"no token was made: {what}; name some of {', '.join(SCOPES)}")
    body = f"{SCOPED_PREFIX}-{'+'.join(sorted({*scopes}))}-{int(expires_at)}"
    return f"{body}-{_signature(token, 'scoped', body)}"


class Subject(NamedTuple):
    """What a key for feedback is bound to."""

    kind: Literal["conversation", "response"]
    name: str


def feedback_key(token: str, subject: Subject, expires_at: float) -> str:
    """Make a key for feedback on one conversation or response until `expires_at` (Unix seconds). Raises UsageError without a token."""
    if not token:
        raise UsageError(NO_TOKEN)
    body = f"{FEEDBACK_PREFIX}-{subject.kind}-{subject.name.encode().hex()}-{int(expires_at)}"
    return f"{body}-{_signature(token, 'feedback', body)}"


def ingest_key(token: str) -> str:
    """The telemetry key bound to no attempt; empty if the stack has no token."""
    return KEY_PREFIX + _signature(token, "otlp") if token else ""


def attempt_ingest_key(token: str, rollout_id: str, attempt_id: str) -> str:
    """The telemetry key of one attempt; empty if the stack has no token."""
    named = f"{rollout_id}/{attempt_id}"
    return f"{BOUND_PREFIX}{named}-{_signature(token, 'otlp', named)}" if token else ""


def attempt_key(token: str, rollout_id: str, attempt_id: str) -> str:
    """The model key of one attempt, for `OPENAI_API_KEY`."""
    return KEY_PREFIX + _signature(token, f"{rollout_id}/{attempt_id}")


def shared_key(token: str) -> str:
    """The model key of a process that runs many attempts."""
    return KEY_PREFIX + _signature(token, "shared")


def model_server_key(token: str) -> str:
    """The key of model servers that a training run starts on a cluster; empty if the stack has no token."""
    return KEY_PREFIX + _signature(token, "model-server") if token else ""


def is_ours(key: str, token: str = "") -> bool:
    """Whether this is the stack's token or looks like a key derived from one, which must not be sent to a provider."""
    return key.startswith((KEY_PREFIX, SCOPED_PREFIX, FEEDBACK_PREFIX, BOUND_PREFIX)) or bool(token and key == token)


def _signature(token: str, *parts: str) -> str:
    """Sign the parts, joined by NUL, which no id contains, so that keys of different kinds cannot coincide."""
    return hmac.new(token.encode(), "\0".join(parts).encode(errors="replace"), sha256).hexdigest()[:SIGNATURE_DIGITS]


def _same(given: str | bytes, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(errors="replace") if isinstance(given, str) else given, expected.encode())


# --- what is shown


def bearer(headers: Mapping[str, str]) -> str:
    """The token in the Authorization header; the scheme may be left out."""
    return without_scheme(headers.get("Authorization", ""))


def without_scheme(authorization: str) -> str:
    """Return an Authorization header without the scheme Bearer, whose case does not matter (RFC 9110, section 11.1)."""
    return authorization[len(_BEARER) :] if authorization[: len(_BEARER)].lower() == _BEARER else authorization


def is_token_itself(authorization: str, token: str) -> bool:
    """Whether an Authorization header holds exactly this token, not one derived from it."""
    return _same(without_scheme(authorization), token)


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the Authorization of a gRPC call; the first of several, as over HTTP."""
    given = next((value for key, value in metadata or () if key == "authorization"), "")
    return given.decode(errors="replace") if isinstance(given, bytes) else given


def refusal(token: str, given: str, *scopes: str, now: float | None = None) -> str | None:
    """Return why services of these scopes refuse the token `given`: None if they accept it, empty if it is unknown."""
    if _same(given, token):
        return None
    body, _, signature = given.rpartition("-")
    if not body.startswith(f"{SCOPED_PREFIX}-") or not _same(signature, _signature(token, "scoped", body)):
        return ""
    _, names, until = body.split("-")
    if (why := _expired(int(until), now)) is not None:
        return why
    if not {*names.split("+")} & {*scopes}:
        return f"this token is for {names.replace('+', ', ')} and not for {scopes[0]}"
    return None


def subject_of(token: str, given: str, *, now: float | None = None) -> Subject | str | None:
    """Return what a key for feedback is bound to, or why it is refused; None if it is no such key of this stack."""
    body, _, signature = given.rpartition("-")
    if not token or not body.startswith(f"{FEEDBACK_PREFIX}-") or not _same(signature, _signature(token, "feedback", body)):
        return None
    _, kind, name, until = body.split("-")
    why = _expired(int(until), now)
    return why or Subject(cast("Literal['conversation', 'response']", kind), bytes.fromhex(name).decode())


def _expired(until: int, now: float | None) -> str | None:
    if (time.time() if now is None else now) < until:
        return None
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(until))
    return f"this token expired at {when} UTC: ask for another one (`agl-otel token`)"


def shown_to_proxy(headers: Mapping[str, str]) -> str:
    """Return the key of a model call, from the header of OpenAI's or of Anthropic's clients."""
    return bearer(headers) or headers.get("x-api-key", "")


def shown_to_sql(headers: Mapping[str, str], query: Mapping[str, str]) -> tuple[str, ...]:
    """Return the candidates for the token of a query, from all places where ClickHouse's clients send a password."""
    sent = headers.get("Authorization", "")
    if sent.lower().startswith("basic "):
        with contextlib.suppress(ValueError):
            _, colon, password = base64.b64decode(sent[len("basic ") :], validate=True).decode("latin-1").partition(":")
            sent = password if colon else sent
    return without_scheme(sent), headers.get("X-ClickHouse-Key", ""), query.get("password", "")


# --- ports


@dataclass(frozen=True)
class PortAccess:
    """Access to a port that requires the stack's token: the scopes whose tokens suffice as well, and the text of a refusal."""

    scopes: tuple[str, ...]
    """The first is the port's name in refusals."""
    no_token: str
    """The refusal of a request without a valid token."""

    def refusal(self, token: str, headers: Mapping[str, str], *more: str) -> str | None:
        """Return why a request with these headers is refused; None if it is allowed. `more`: further scopes that open this path."""
        return self.refusal_of_all(token, (bearer(headers),), *more)

    def refusal_of_all(self, token: str, candidates: Sequence[str], *more: str) -> str | None:
        """Do as `refusal` does, for several candidate tokens of which one must be valid."""
        if not token:
            return None
        words = ""
        for given in candidates:
            why = refusal(token, given, *self.scopes, *more)
            if why is None:
                return None
            words = words or why
        return words or self.no_token


QUEUE: Final = PortAccess(("queue",), "this queue wants a token: set AGL_TOKEN to the one the stack was started with")
COLLECTOR: Final = PortAccess(("collector",), "this is no token of this stack")
SQL: Final = PortAccess(("clickhouse",), "this endpoint wants the token (AGL_TOKEN): Authorization: Bearer TOKEN, or the password")
PROXY: Final = PortAccess(("proxy",), NEEDED)
WEB: Final = PortAccess(("web",), NEEDED)
FEEDBACK: Final = PortAccess(("web",), "feedback wants a bearer token or a key: `agl-otel token --for feedback` makes them")
JAEGER: Final = PortAccess(("web", "view"), "this port wants the header `authorization: Bearer TOKEN` (AGL_TOKEN)")
METRICS: Final = PortAccess(("metrics",), NEEDED)


def refused_error(what: str, token: str, reason: str) -> SettingsError:
    """Return the error for a client that `what` refused. `reason` is the server's reason, shown if it explains more than a wrong token."""
    if not token:
        return SettingsError(f"{what} wants a token, and none was given: {_SET}")
    generic = reason in (NEEDED, QUEUE.no_token)
    return SettingsError(f"{what} does not accept this token: {_SET if generic else reason}")


_SET: Final = "set AGL_TOKEN to the one that it was started with"


# --- senders of telemetry


class Sender(NamedTuple):
    """The sender of telemetry, by its key. The default: a client with the stack's token, or any client without one."""

    is_agent: bool = False
    bound: tuple[str, str] | None = None
    """(rollout, attempt) if the key is bound to an attempt."""


TRUSTED: Final = Sender()


class Admission(NamedTuple):
    """The result of checking the Authorization header of a request to a collector; each transport checks it once."""

    refusal: str | None = None
    """Why the request is refused; None if it is allowed."""
    sender: Sender = TRUSTED


def admission(token: str, authorization: str, *scopes: str, sending: bool = False) -> Admission:
    """Check an Authorization header at a collector; with `sending` a telemetry key suffices. Tokens for `scopes` are accepted, too.

    A refusal tells what is wrong with the form of the header. Of a token it tells only that it is none of this stack, not how near it was;
    who has a valid one learns what it is for.
    """
    given = without_scheme(authorization)
    has_scheme = given != authorization
    if token and has_scheme:
        sender = sender_of(token, given)
        if sender.is_agent:
            return Admission(None if sending else _ONLY_SENDS, sender)
    why = COLLECTOR.refusal_of_all(token, (given,), *scopes)
    if why != COLLECTOR.no_token:
        return Admission(why)
    return Admission(f"{_form(authorization, has_scheme)}: {_SENDERS if sending else _OPERATORS}")


def _form(authorization: str, has_scheme: bool) -> str:
    """Return what is wrong with an Authorization header without a valid token, by its form alone."""
    if not authorization.strip() or authorization.strip().lower() == _BEARER.strip():
        return "no token was sent"
    if has_scheme:
        return "this is no token or key of this stack"
    if authorization.lower().startswith("bearer%20"):
        return "the header has %20 for the space after Bearer, because this sender does not decode it: write a space"
    return "the Authorization header does not begin with `Bearer `"


_SENDERS: Final = "send `Authorization: Bearer KEY`, with the key that `agl-otel token --for otlp` prints, or with AGL_TOKEN"
_OPERATORS: Final = "this path wants `Authorization: Bearer TOKEN`, with the stack's AGL_TOKEN"
_ONLY_SENDS: Final = "this key can only send telemetry; this path wants `Authorization: Bearer TOKEN`, with the stack's AGL_TOKEN"


def is_admitted_anywhere(token: str, authorization: str) -> bool:
    """Whether an Authorization header has a valid token for any port or a telemetry key: its holder may know which paths exist."""
    return admission(token, authorization, *SCOPES, sending=True).refusal is None


def sender_of(token: str, key: str) -> Sender:
    """Return the sender with this key at a collector whose stack has this token."""
    bound = attempt_of(token, key)
    return Sender(is_agent=bound is not None or (bool(token) and _same(key, ingest_key(token))), bound=bound)


def attempt_of(token: str, key: str) -> tuple[str, str] | None:
    """Return (rollout, attempt) of an attempt's telemetry key, if it was derived from this token; else None."""
    named = named_by(key)
    return named if token and named is not None and _same(key, attempt_ingest_key(token, *named)) else None


# --- model calls


def may_call(token: str, given: str, rollout_id: str, attempt_id: str) -> bool:
    """Whether `given` opens this attempt at the proxy: the attempt's key, the shared key, or the stack's token itself."""
    return not token or any(_same(given, key) for key in (attempt_key(token, rollout_id, attempt_id), shared_key(token), token))


def is_trusted(token: str, given: str) -> bool:
    """Whether `given` opens the proxy for a call that names its attempt in a header: the token, one for the proxy, or the shared key."""
    return not token or _same(given, shared_key(token)) or refusal(token, given, "proxy") is None


def may_call_outside(token: str, given: str) -> bool:
    """Whether `given` opens the proxy for a call of no attempt: what `is_trusted` takes, or a token for such calls alone."""
    return is_trusted(token, given) or refusal(token, given, "models") is None


# --- names and pages


@dataclass(frozen=True)
class BrowserAccess:
    """The host names and origins for which browsers may call an HTTP port: any web page can post to 127.0.0.1.

    Reads by other sites are refused as well: the browser hides the answer from the page, but not its timing.
    """

    names: Collection[str] | None = None
    """Host names accepted in requests besides addresses (`own_names`); None: any. Requests of a page whose name resolves to this machine
    have that name (DNS rebinding)."""
    origins: frozenset[str] = frozenset()
    """Origins whose pages may call; * for all."""

    def refusal(self, method: str, headers: Mapping[str, str], *, link: bool = False) -> str | None:
        """Return why such a request is refused; None if it is allowed. `link`: its target is a page that other sites may link to."""
        asked = _asked_name(headers.get("Host", ""))
        if self.names is not None and asked not in self.names and not _is_address(asked):
            return f"this service is not called {asked!r:.100}: use its address, or name it in AGL_ALLOWED_HOSTS"
        origin = headers.get("Origin", "")
        if not _of_another_page(method, headers, origin) or self.origins & {origin, "*"} or (link and _follows_a_link(headers)):
            return None
        return f"pages of {f'{origin!r:.100}' if origin else 'other sites'} may not call this service (AGL_CORS_ORIGINS)"


def own_names(settings: Settings) -> frozenset[str] | None:
    """Return the host names of services that require no token and are reachable from this machine only (see `BrowserAccess`); None: any.

    With a token no check is needed, because other pages do not have it.
    """
    return None if settings.token.get_secret_value() else names_on(settings.host, settings.announced_host, allowed=settings.allowed_hosts)


def names_on(host: str, *others: str, allowed: str) -> frozenset[str] | None:
    """Return the names of a service on `host` that requires no token, with those `allowed` (AGL_ALLOWED_HOSTS).

    None: any, as for a service that other machines can reach.
    """
    named = {name.strip().lower() for name in allowed.split(",") if name.strip()}
    return None if "*" in named or not is_loopback(host) else frozenset({host.lower(), *map(str.lower, others), *named})


def is_loopback(host: str) -> bool:
    """Whether a service on `host`, an address or a name, is reachable from this machine only.

    Debian resolves a machine's own name to 127.0.1.1.
    """
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)} if host else set[str]()
    except (OSError, UnicodeError):  # it cannot be listened on either
        return False
    return bool(found) and all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found)


def _of_another_page(method: str, headers: Mapping[str, str], origin: str) -> bool:
    """Whether a page of another origin caused the request, by the headers that browsers add."""
    site = headers.get("Sec-Fetch-Site", "")
    if site in _OTHER_SITES:
        return True
    if method in _READING or not origin or site == "same-origin":
        return False
    return origin.partition("://")[2] != headers.get("Host")  # an origin is scheme and host only


def _follows_a_link(headers: Mapping[str, str]) -> bool:
    """Whether the request is a navigation to a document, as from a link."""
    return (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) == ("navigate", "document")


@lru_cache(maxsize=64)
def _asked_name(host: str) -> str:
    """Return the host name of a Host header in lower case, without the port; an invalid header unchanged."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # unbalanced brackets
        return host


def _is_address(host: str) -> bool:
    """Whether it is an address, except 0.0.0.0: it reaches this machine, but browsers send no origin with requests to it."""
    with contextlib.suppress(ValueError):
        return not ipaddress.ip_address(host).is_unspecified
    return host in ("", "localhost")

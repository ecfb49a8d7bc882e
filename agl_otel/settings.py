"""Settings, from flags, environment, `agl.toml` and defaults, in this order of precedence. Nothing else reads AGL_* variables.

A child process gets all settings that its parent resolved: `Settings.environment` writes them, and `load` then reads nothing else.
"""

from __future__ import annotations

import atexit
import difflib
import math
import os
import random
import socket
import sys
import time
import tomllib
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from agl_otel.errors import InUseError, SettingsError

CONFIG_FILE: Final = "agl.toml"
SECRETS: Final = ("token", "upstream_key", "forward_headers", "metrics_otlp_headers")
_OWN_PORTS: Final = range(20_000, 32_000)
DAY_SECONDS: Final = 86400.0  # retention is set in days
RESERVED_SECONDS: Final = 120.0  # longer than a service takes to start on a busy machine
_reserved: Final[deque[tuple[float, socket.socket]]] = deque()
"""(end of its reservation, socket bound to a port of `free_ports`), the oldest first."""
PORTS: Final = ("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port", "web_port")
PREFIX: Final = "AGL_"
RESOLVED: Final = "AGL_RESOLVED"
"""Set along with the variables of `Settings.environment`: then empty variables count, too, and agl.toml is not read."""
PRIVATE: Final[Mapping[str, Any]] = {
    **dict.fromkeys((*PORTS, "jaeger_port", "queue_metrics_port", "runner_metrics_port"), 0),
    **dict.fromkeys(("store", "queue_url", "clickhouse_url", "collector", "advertise"), ""),
    **dict.fromkeys(("forward_otlp", "metrics_otlp"), ""),
}
"""Settings of a private stack of one data directory: it ignores stores and collectors named in the environment, and takes no fixed
ports."""
MISTYPED: Final = 0.8  # similarity (difflib) above which a variable counts as a mistyped setting
_warned: Final[set[str]] = set()
_FILES: Final = ("mask", "models", "tls_cert", "tls_key", "tls_client_ca", "tls_ca", "tls_client_cert", "tls_client_key")


class Settings(BaseSettings):
    """The settings of every service and command. Build them with `Settings.load(**flags)`, which raises readable errors."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", env_ignore_empty=True, use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address (or a name of it) that services listen on. Nothing of the stack listens beyond loopback unless this says so; model
    servers of a training on a Ray cluster do (docs/security.md)."""
    advertise: str = ""
    """The host name (or address) by which others reach the services of this process, if it is not `host`: in a container, whose `host`
    is 0.0.0.0, the container's name."""
    data_dir: Path = Path(".agl")
    """The folder of all stored data: queue, traces, write-ahead log, runs, stack.json."""
    queue_port: int = Field(default=4747, ge=0, le=65535)
    """gRPC of the queue, the only address that clients need."""
    otlp_grpc_port: int = Field(default=4317, ge=0, le=65535)
    """OTLP over gRPC."""
    otlp_http_port: int = Field(default=4318, ge=0, le=65535)
    """OTLP over HTTP, with the collector's `/health` and `/barrier`."""
    clickhouse_port: int = Field(default=8123, ge=0, le=65535)
    """ClickHouse's HTTP protocol, read-only."""
    proxy_port: int = Field(default=4000, ge=0, le=65535)
    """The model proxy (OpenAI-compatible)."""
    web_port: int = Field(default=4748, ge=0, le=65535)
    """The dashboard, REST, OTLP over HTTP, metrics and Jaeger's HTTP API, on one port."""
    jaeger_port: int = Field(default=0, ge=0, le=65535)
    """gRPC for a Jaeger that reads its traces from here (remote storage v2, for which Jaeger itself takes 17271); 0: not served."""
    queue_metrics_port: int = Field(default=0, ge=0, le=65535)
    """The port of the queue's own metrics (`/metrics`, for Prometheus); 0: none, and the web service's page has those of one queue."""
    runner_metrics_port: int = Field(default=0, ge=0, le=65535)
    """The port of a runner's own metrics (`/metrics`); 0: none. Each runner of a machine needs its own port."""
    cors_origins: str = ""
    """Origins (scheme://host:port, or *) whose pages may call the web service, separated by commas; empty: none."""
    feedback_per_minute: int = Field(default=60, ge=1, le=1_000_000)
    """Most feedback in a minute with a key for one conversation or response (`agl-otel token --for feedback --conversation ID`). A token
    for feedback on any may send a hundred times as much."""
    allowed_hosts: str = ""
    """Further Host names, separated by commas, that HTTP ports on loopback accept while there is no token, besides addresses, `localhost`
    and their own name: such as that of a reverse proxy on this machine, or the one by which containers call; * for any."""
    queue_url: str = ""
    """sqlite:///PATH or postgresql://…; empty means queue.db in the data directory."""
    clickhouse_url: str = ""
    """chdb:///PATH, or clickhouse://… of a server (docs/clickhouse.md); empty means traces/ in the data directory."""
    collector: str = ""
    """Path of an OpenTelemetry Collector with this project's processor (`make otelcol`) to use as the collector, with a ClickHouse
    server; empty: the Python collector."""
    retention_days: int = Field(default=0, ge=0, le=36500)
    """How many days to keep spans, logs and metrics in ClickHouse, from the day of their receipt, and finished rollouts in the queue; 0
    keeps them for ever."""
    store: str = ""
    """The address of a running stack (queue gRPC or web HTTP); clients use it."""
    token: SecretStr = SecretStr("")
    """Bearer token that every service requires; empty: none."""
    upstream_url: str = ""
    """Where the proxy sends calls of no rollout, and of rollouts without an LLM among their resources (an OpenAI-compatible base URL, or
    several separated by commas)."""
    upstream_resources: str = "production"
    """The id of a set of resources whose newest version serves calls of no rollout, where the queue has such a set with an LLM: all but
    those whose model only `models` names. Without it `models` and `upstream_url` serve them. Empty: no set does."""
    upstream_key: SecretStr = SecretStr("")
    """The key of the server at `upstream_url`; agents never see it."""
    models: str = ""
    """A JSON file with models known to the proxy: [{"model_name", "litellm_params": {"model", "api_base", …}}]."""
    litellm: str = ""
    """The Python interpreter of an environment with litellm[proxy]. The proxy then runs litellm as a separate process, so that agents with
    Anthropic's Messages or OpenAI's Responses can use model servers that only support chat/completions, with all token ids."""
    translate: Literal["auto", "missing", "always"] = "auto"
    """Which calls of Messages and Responses litellm converts to chat/completions: `missing`, those for which the model server has no
    route; `auto`, also those that it answers without token ids while its chat/completions has them; `always`, all."""
    litellm_url: str = ""
    """The address of your own litellm proxy (http://host:4001/v1), for models of providers that are not OpenAI-compatible servers; empty:
    the one of `litellm`, which takes their keys from the resource, else from the environment."""
    attempt_max_calls: int = Field(default=0, ge=0)
    """How many model calls one attempt may make; 0: no limit. A rollout's metadata may override it: {"budget": {"calls", "tokens"}}."""
    attempt_max_tokens: int = Field(default=0, ge=0)
    """How many tokens the model may write in one attempt; 0: no limit."""
    unidentified: Literal["keep", "drop", "adopt"] = "keep"
    """Spans and log records of no rollout: `keep` stores them without ids (they are identified later if possible), `drop` discards them,
    `adopt` makes a production rollout of every complete unidentified trace, `adopt_quiet_seconds` after its last span."""
    adopt_quiet_seconds: float = Field(default=60.0, ge=1.0, le=86400.0)
    """After how long without a span a trace counts as complete, for `adopt`. Longer than the longest pause of an agent: what comes later
    joins the rollout, and changes neither its input nor its outcome."""
    mask: str = ""
    """A TOML file of masking rules, as for `agl-otel export --mask`: matching content is dropped or hashed before anything is stored or
    forwarded (the Python collector only); empty masks nothing."""
    metrics: bool = True
    """Whether the collector accepts OTLP metrics; otherwise it answers UNIMPLEMENTED (HTTP 501). The Python collector only: for the Go one
    its configuration decides."""
    core: Literal["auto", "compiled", "python"] = "auto"
    """What reads OTLP requests and builds rows in the Python collector: `compiled` code, or `python`, which does the same more slowly.
    `auto` takes the compiled core where it is installed."""
    max_message_bytes: int = Field(default=64 << 20, ge=1024, le=1 << 30)
    """The largest accepted OTLP request, in bytes after decompression."""
    max_span_attributes: int = Field(default=4096, ge=1)
    """The most attributes of a span; one with more is refused, with the reason in the partial success (the Python collector only; the Go
    one has no such bound)."""
    max_expanded_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """The approximate size limit of the rows of one OTLP request, in bytes: each span, log record or data point is stored with its whole
    resource and scope, which a request holds once. A larger request is refused (HTTP 400, INVALID_ARGUMENT). The default has room for
    8,192 spans (a batch of the OpenTelemetry Collector) with a resource of 20 KiB, or for 512 (an SDK's) with one of 400 KiB; most have
    some KiB."""
    max_in_flight_bytes: int = Field(default=256 << 20, ge=1024)
    """The most bytes of OTLP requests waiting for the disk; beyond it clients must retry (UNAVAILABLE, HTTP 503). In the Go collector:
    of requests in progress, until they are answered."""
    proxy_max_in_flight_bytes: int = Field(default=1 << 30, ge=1024)
    """The most bytes of unpacked bodies of calls that the proxy holds at once, each from its first byte until it is answered. Further
    calls must retry (HTTP 503, Retry-After). One body may have 64 MiB."""
    wal_budget_bytes: int = Field(default=4 << 30, ge=1 << 20)
    """The largest size of the write-ahead log while ClickHouse does not keep up, in bytes; a warning comes at 70 %, UNAVAILABLE at 100 %
    (the Python collector only)."""
    disk_reserve_bytes: int = Field(default=256 << 20, ge=0)
    """Free disk space, in bytes, below which requests are refused (UNAVAILABLE); a warning comes at four times as much (the Python
    collector only)."""
    tls_cert: str = ""
    """PEM file of the certificate (chain) of the services; with `tls_key` their ports use TLS only, except the Go collector's own health
    and metrics ports and the model servers of trainings."""
    tls_key: str = ""
    """PEM file of the private key for `tls_cert`."""
    tls_client_ca: str = ""
    """PEM file of the authority whose certificates clients must present (mTLS); empty: none are required. The proxy requires them only
    with `proxy_client_certificates`, since most model clients of agents cannot present one."""
    proxy_client_certificates: bool = False
    """Whether agents must present a certificate of `tls_client_ca` to the proxy besides their key; their model clients must be configured
    to do so."""
    proxy_own_keys: bool = False
    """Whether, on a stack with a token, the proxy forwards calls of no attempt that carry their own provider's key instead of the token:
    from any client, to the servers of `upstream_resources` (but its canaries), `models` and `upstream_url`, without keys or passwords of
    the stack."""
    tls_ca: str = ""
    """PEM file of the authority that clients trust (for a self-signed `tls_cert` the same file); empty: the system's authorities. If set,
    addresses without a scheme are dialled with TLS."""
    tls_client_cert: str = ""
    """PEM file of the certificate that clients present if `tls_client_ca` requires one; the services are each other's clients."""
    tls_client_key: str = ""
    """PEM file of the private key for `tls_client_cert`."""
    forward_otlp: str = ""
    """A second OTLP endpoint that receives a copy of every accepted request: http://host:4318, https://…, grpc://host:4317 or grpcs://…
    (the Python collector only)."""
    forward_headers: SecretStr = SecretStr("")
    """Headers for `forward_otlp`, as name=value,name=value (values may be percent-encoded), like OTEL_EXPORTER_OTLP_HEADERS."""
    metrics_otlp: str = ""
    """The endpoint to which every service but the Go collector pushes its own metrics by OTLP over gRPC: HOST:4317 or https://HOST:4317;
    empty: none."""
    metrics_otlp_headers: SecretStr = SecretStr("")
    """Headers for `metrics_otlp`, written as for `forward_headers`."""
    metrics_otlp_seconds: float = Field(default=60.0, gt=0)
    """The interval of these pushes, in seconds."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_format: Literal["text", "json"] = "text"
    """The log format of the services: text, or json (one object per line); the Go collector's is in its configuration."""

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value

    @field_validator("data_dir", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if value == "":  # which would be the current folder
            raise ValueError("the path is empty: name a folder")
        return value

    @field_validator("upstream_url")
    @classmethod
    def _urls(cls, value: str) -> str:
        for url in filter(None, (part.strip() for part in value.split(","))):
            if not (url.startswith(("http://", "https://")) and urlsplit(url).hostname):
                raise ValueError(f"{url[:100]!r} is no URL: write http://HOST:PORT/v1")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return flags, environment and agl.toml; in a child process, flags and what its parent resolved."""
        if RESOLVED in os.environ:
            return init_settings, EnvSettingsSource(settings_cls, env_ignore_empty=False)
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, CONFIG_FILE)

    @classmethod
    def load(cls, **flags: Any) -> Settings:
        """Load settings from flags (None: not given), environment and agl.toml.

        Raises SettingsError, which names each wrong setting, its source, and what is expected.
        """
        try:
            settings = cls(**{name: value for name, value in flags.items() if value is not None})
        except ValidationError as error:
            wrong = "; ".join(f"{_source(str(e['loc'][0]), flags)}: {e['msg']} (got {e['input']!r})" for e in error.errors())
            raise SettingsError(f"wrong settings: {wrong}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{CONFIG_FILE} is not TOML: {error}") from None
        unknown = _unknown_toml_keys(cls)
        _warn_of_mistyped(cls)
        if unknown:
            raise SettingsError(f"{CONFIG_FILE} has unknown keys: {', '.join(unknown)}. Known keys: {', '.join(cls.model_fields)}")
        return settings

    @classmethod
    def private(cls, **flags: Any) -> Settings:
        """Load the settings of a private stack: those in PRIVATE have its values unless a flag overrides them."""
        return cls.load(**PRIVATE | {name: value for name, value in flags.items() if value is not None})

    @property
    def announced_host(self) -> str:
        """The host that services register with the queue."""
        return self.advertise or self.host

    @property
    def adopts_after(self) -> float | None:
        """How long a trace of no rollout is quiet before it is adopted, in seconds; None: it is not adopted."""
        return self.adopt_quiet_seconds if self.unidentified == "adopt" else None

    @property
    def queue_db(self) -> str:
        """The queue's database URL, with the default filled in."""
        return self.queue_url or f"sqlite:///{self.data_dir.absolute() / 'queue.db'}"

    @property
    def clickhouse_db(self) -> str:
        """The ClickHouse URL, with the default filled in."""
        return self.clickhouse_url or f"chdb:///{self.data_dir.absolute() / 'traces'}"

    @property
    def wal_dir(self) -> Path:
        """The collector's write-ahead log."""
        return self.data_dir.absolute() / "wal"

    @property
    def queue_address(self) -> str:
        """The queue's address: `store`, else host and port of these settings."""
        return self.store or f"{'https://' if self.tls_cert else ''}{self.host}:{self.queue_port}"

    def with_ports(self, taken: Mapping[str, int] | None = None) -> Settings:
        """Return a copy in which every port of 0 is replaced by that in `taken` or by a free one."""
        chosen: dict[str, int] = {name: getattr(self, name) or (taken or {}).get(name, 0) for name in PORTS}
        missing = [name for name, port in chosen.items() if not port]
        return self.model_copy(update=chosen | dict(zip(missing, free_ports(len(missing), self.host), strict=True)))

    def environment(self) -> dict[str, str]:
        """Return the AGL_* variables, empty ones included, with which a child process loads exactly these settings."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        values["data_dir"] = self.data_dir.absolute()
        values |= {name: Path(values[name]).absolute() for name in _FILES if values[name]}
        values |= {name: values[name].get_secret_value() for name in SECRETS}
        return {RESOLVED: "1", **{f"{PREFIX}{name.upper()}": str(value) for name, value in values.items()}}


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without AGL_* variables, for a child process that gets its settings separately."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}


def check_host(host: str) -> None:
    """Raise SettingsError if this machine cannot listen on `host`, whatever the port; [] may stand around an IPv6 address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host.strip("[]"), 0))
        except OSError as error:
            raise SettingsError(
                f"this machine cannot listen on host {host!r} ({error.strerror}): name an address of its own with --host or AGL_HOST, "
                "127.0.0.1 for this machine alone, 0.0.0.0 for all that reach it"
            ) from None


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return distinct free ports below the system's ephemeral range, so that no outgoing connection takes them meanwhile.

    On Linux they are reserved for RESERVED_SECONDS, so that no other process finds them free before a server listens there; a server that
    sets SO_REUSEADDR, as all do, can listen nevertheless. Raises InUseError if there are not enough, SettingsError for a host of another
    machine.
    """
    check_host(host)
    _give_back(time.monotonic())
    ports: list[int] = []
    for port in random.SystemRandom().sample(_OWN_PORTS, len(_OWN_PORTS)):  # forks of one process, or two with one seed, must differ
        if len(ports) == count:
            break
        if _reserve(host, port):
            ports.append(port)
    if len(ports) < count:
        raise InUseError(f"there are not {count} free ports from {_OWN_PORTS[0]} to {_OWN_PORTS[-1]} on {host}: name ports in the settings")
    return ports


def _give_back(now: float) -> None:
    while _reserved and _reserved[0][0] <= now:
        _reserved.popleft()[1].close()


atexit.register(_give_back, math.inf)


def _reserve(host: str, port: int) -> bool:
    """Reserve a port; return whether it was free. A bound socket blocks binds without SO_REUSEADDR, by which free ports are searched."""
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        holder.bind((host, port))
    except OSError:
        holder.close()
        return False
    if sys.platform != "linux":  # on other systems a bound port is taken for everyone
        holder.close()
        return True
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # if set on both sockets, Linux lets the second one bind and listen
    _reserved.append((time.monotonic() + RESERVED_SECONDS, holder))
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """Return one port of `free_ports`."""
    return free_ports(1, host)[0]


def _source(name: str, flags: Mapping[str, Any]) -> str:
    if flags.get(name) is not None:
        return f"--{name.replace('_', '-')}"
    return f"AGL_{name.upper()}" if f"AGL_{name.upper()}" in os.environ else f"{name} in {CONFIG_FILE}"


def _unknown_toml_keys(cls: type[Settings]) -> list[str]:
    if RESOLVED in os.environ or not Path(CONFIG_FILE).exists():
        return []
    return sorted(set(TomlConfigSettingsSource(cls, CONFIG_FILE).toml_data) - set(cls.model_fields))


def _warn_of_mistyped(cls: type[Settings]) -> None:
    """Print a warning for each AGL_ variable that resembles a setting. Others may belong to agents or other parts of this project."""
    if RESOLVED in os.environ or "AGL_ROLLOUT_ID" in os.environ:  # in a child process: the parent has warned
        return
    settings = {name.upper(): f"{PREFIX}{name.upper()}" for name in cls.model_fields}
    unknown = {name for name in os.environ if name.startswith(PREFIX)} - {*settings.values()} - _warned
    for variable in sorted(unknown):
        if near := difflib.get_close_matches(variable.removeprefix(PREFIX), settings, n=1, cutoff=MISTYPED):
            _warned.add(variable)
            text = f"warning: {variable} is no setting of agl-otel and is ignored; did you mean {settings[near[0]]}?"
            print(text, file=sys.stderr)  # noqa: T201 - logs are configured by settings


def parse_headers(text: str, setting: str) -> Mapping[str, str]:
    """Parse `name=value,name=value`, with values percent-decoded and names lower-cased. Raises SettingsError without the values."""
    found: dict[str, str] = {}
    for number, pair in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise SettingsError(f"{setting}: entry {number} is not name=value")
        found[name.strip().lower()] = unquote(value.strip())
    return found

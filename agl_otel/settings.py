"""Settings: flags over environment over `agl.toml` over defaults. Nothing else reads AGL_* variables.

A child process of ours gets what its parent resolved, whole: `Settings.environment` writes it, `load` reads nothing beside it.
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
DAY_SECONDS: Final = 86400.0  # what is kept for some time is kept for days
RESERVED_SECONDS: Final = 120.0  # longer than a service takes to start on a busy machine
_reserved: Final[deque[tuple[float, socket.socket]]] = deque()
"""(until when, a socket bound to a port of `free_ports`), the oldest first."""
PORTS: Final = ("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port", "web_port")
PREFIX: Final = "AGL_"
RESOLVED: Final = "AGL_RESOLVED"
"""Set beside what `Settings.environment` writes: empty variables count as well, and agl.toml is not read."""
PRIVATE: Final[Mapping[str, Any]] = {
    **dict.fromkeys((*PORTS, "jaeger_port", "queue_metrics_port", "runner_metrics_port"), 0),
    **dict.fromkeys(("store", "queue_url", "clickhouse_url", "collector", "advertise"), ""),
    **dict.fromkeys(("forward_otlp", "metrics_otlp"), ""),
}
"""Settings of a stack that belongs to one data directory: it reaches no store or collector that the surroundings name, and is taken for no
other."""
MISTYPED: Final = 0.8  # similarity (difflib) from which a variable is taken for a setting's
_warned: Final[set[str]] = set()
_FILES: Final = ("mask", "models", "tls_cert", "tls_key", "tls_client_ca", "tls_ca", "tls_client_cert", "tls_client_key")


class Settings(BaseSettings):
    """What every service and command runs with. Build it with `Settings.load(**flags)`, which words errors for people."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", env_ignore_empty=True, use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address (or a name of it) that services listen on. Nothing of the stack listens beyond loopback unless this says so; model
    servers of a training on a Ray cluster do (docs/security.md)."""
    advertise: str = ""
    """The host name (or address) by which others reach the services of this process, where it is not `host`: in a container, whose `host`
    is 0.0.0.0, the container's name."""
    data_dir: Path = Path(".agl")
    """Everything that is kept: queue, traces, write-ahead log, runs, stack.json."""
    queue_port: int = Field(default=4747, ge=0, le=65535)
    """gRPC of the queue: the one address that clients need."""
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
    """Where the queue serves its own metrics (`/metrics`, for Prometheus); 0: not, and the web service's page has those of one queue."""
    runner_metrics_port: int = Field(default=0, ge=0, le=65535)
    """Where a runner serves its own metrics (`/metrics`); 0: not. Each runner of a machine needs a port of its own."""
    cors_origins: str = ""
    """Origins (scheme://host:port, or *) whose pages may call the web service, separated by commas; empty means none."""
    allowed_hosts: str = ""
    """Host names, separated by commas, by which HTTP ports on loopback may be asked for while there is no token, beside addresses,
    `localhost` and their own name: of a reverse proxy on this machine, say, or the one by which containers call; * for any."""
    queue_url: str = ""
    """sqlite:///PATH or postgresql://…; empty means queue.db in the data directory."""
    clickhouse_url: str = ""
    """chdb:///PATH or clickhouse://…; empty means traces/ in the data directory."""
    collector: str = ""
    """Path of an OpenTelemetry Collector with our processor (`make otelcol`), which then is the collector, with a ClickHouse server;
    empty means the Python one."""
    retention_days: int = Field(default=0, ge=0, le=36500)
    """How many days spans, logs and metrics are kept in ClickHouse, from the day they were received, and finished rollouts in the queue;
    0 keeps them for ever."""
    store: str = ""
    """The address of a running stack (queue gRPC or web HTTP); clients use it."""
    token: SecretStr = SecretStr("")
    """Bearer token that every service then asks for; empty means none."""
    upstream_url: str = ""
    """Where the proxy sends calls of rollouts that have no LLM among their resources, and of no rollout (an OpenAI-compatible base URL, or
    several with commas between)."""
    upstream_key: SecretStr = SecretStr("")
    """The key of the server at `upstream_url`; agents never see it."""
    models: str = ""
    """A JSON file with the models that the proxy knows by itself: [{"model_name", "litellm_params": {"model", "api_base", …}}]."""
    litellm: str = ""
    """The Python interpreter of an environment that has litellm[proxy]. The proxy then runs litellm as a process of its own: agents that
    speak Anthropic's Messages or OpenAI's Responses are served by model servers that only know chat/completions, with all token ids."""
    translate: Literal["auto", "missing", "always"] = "auto"
    """Which calls of Messages and Responses litellm turns into chat/completions: `missing` those that the model server has no route for,
    `auto` also those that it answers without token ids while its chat/completions has them, `always` all."""
    litellm_url: str = ""
    """Where a litellm proxy of your own serves (http://host:4001/v1): models of providers other than OpenAI-compatible servers are asked
    through it; without, through the one of `litellm`, which takes their keys from the resource, else from the environment."""
    attempt_max_calls: int = Field(default=0, ge=0)
    """How many model calls one attempt may make; 0 is no limit. A rollout's metadata may say otherwise: {"budget": {"calls", "tokens"}}."""
    attempt_max_tokens: int = Field(default=0, ge=0)
    """How many tokens the model may write in one attempt; 0 is no limit."""
    unidentified: Literal["keep", "drop", "adopt"] = "keep"
    """Spans and log records of no rollout: `keep` stores them without ids (they are identified later, where that is possible), `drop`
    stores nothing of them, `adopt` makes a production rollout of every whole trace that nobody identified, 60 s after it went quiet."""
    mask: str = ""
    """A TOML file of masking rules, as `agl-otel export --mask` takes them: what they name is dropped or hashed before anything is kept
    or copied (the Python collector only); empty masks nothing."""
    metrics: bool = True
    """Whether the collector takes OTLP metrics; without, it answers UNIMPLEMENTED (HTTP 501). The Python collector only: the Go one takes
    them by its configuration."""
    max_message_bytes: int = Field(default=64 << 20, ge=1024, le=1 << 30)
    """The largest OTLP request that is taken, in bytes after decompression."""
    max_span_attributes: int = Field(default=4096, ge=1)
    """A span with more attributes is refused, with its reason in the partial success (the Python collector only; the Go one has no such
    bound)."""
    max_expanded_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """How large the rows of one OTLP request may be, about, in bytes: each span, log record or data point is stored with its whole resource
    and scope, which a request holds once. A request beyond it is refused (HTTP 400, INVALID_ARGUMENT). The default has room for 8,192 spans
    (a batch of the OpenTelemetry Collector) with a resource of 20 KiB, or for 512 (an SDK's) with one of 400 KiB; most take some KiB."""
    max_in_flight_bytes: int = Field(default=256 << 20, ge=1024)
    """OTLP requests that may wait for the disk together, in bytes; beyond it clients are told to send again (UNAVAILABLE, HTTP 503).
    In the Go collector: that are being taken, until they are answered."""
    proxy_max_in_flight_bytes: int = Field(default=1 << 30, ge=1024)
    """Bodies of calls that the proxy holds together, in bytes, unpacked: from their first byte until they are answered. A call that finds
    no room is told to come again (HTTP 503, Retry-After). One body may have 64 MiB."""
    wal_budget_bytes: int = Field(default=4 << 30, ge=1 << 20)
    """How large the write-ahead log may grow while ClickHouse does not keep up; a warning comes at 70 %, UNAVAILABLE at 100 % (the Python
    collector only)."""
    disk_reserve_bytes: int = Field(default=256 << 20, ge=0)
    """Free disk space below which nothing more is taken (UNAVAILABLE); a warning comes at four times as much (the Python collector
    only)."""
    tls_cert: str = ""
    """PEM file of the certificate (chain) of the services; with `tls_key` their ports speak TLS only. Not so the Go collector's own health
    and metrics ports, and the model servers of trainings."""
    tls_key: str = ""
    """PEM file of the private key that belongs to `tls_cert`."""
    tls_client_ca: str = ""
    """PEM file of the authority whose certificates clients must show (mTLS); empty means clients need none. The proxy asks for none,
    unless `proxy_client_certificates` says so: most model clients of agents cannot show one."""
    proxy_client_certificates: bool = False
    """Whether agents must show the proxy a certificate of `tls_client_ca`, beside their key: their model clients must be told to."""
    proxy_own_keys: bool = False
    """Whether, on a stack with a token, the proxy passes on calls of no attempt that bring a provider's key of their own instead: to the
    servers that `upstream_url` and `models` name, for anybody who reaches the port, with no key or password of the stack."""
    tls_ca: str = ""
    """PEM file of the authority that clients trust (for a self-signed `tls_cert` the same file); empty means the system's authorities.
    Where it is set, addresses without a scheme are dialled with TLS."""
    tls_client_cert: str = ""
    """PEM file of the certificate that clients show where `tls_client_ca` demands one; the services are each other's clients."""
    tls_client_key: str = ""
    """PEM file of the private key that belongs to `tls_client_cert`."""
    forward_otlp: str = ""
    """A second OTLP endpoint that gets a copy of every accepted request: http://host:4318, https://…, grpc://host:4317 or grpcs://… (the
    Python collector only)."""
    forward_headers: SecretStr = SecretStr("")
    """Headers for `forward_otlp`, as name=value,name=value (values may be percent-encoded), like OTEL_EXPORTER_OTLP_HEADERS."""
    metrics_otlp: str = ""
    """Where every service but the Go collector pushes its own metrics by OTLP over gRPC: HOST:4317 or https://HOST:4317; empty: nowhere."""
    metrics_otlp_headers: SecretStr = SecretStr("")
    """Headers for `metrics_otlp`, written as for `forward_headers`."""
    metrics_otlp_seconds: float = Field(default=60.0, gt=0)
    """How often they are pushed."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_format: Literal["text", "json"] = "text"
    """How services write their logs: text for people, or json (one object a line); the Go collector by its configuration."""

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value

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
        """Flags, then environment, then agl.toml; in a child of ours, flags and what its parent resolved."""
        if RESOLVED in os.environ:
            return init_settings, EnvSettingsSource(settings_cls, env_ignore_empty=False)
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, CONFIG_FILE)

    @classmethod
    def load(cls, **flags: Any) -> Settings:
        """Settings from flags (None means not given), environment and agl.toml.

        Raises SettingsError that names each wrong setting, where it comes from and what it takes.
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
        """Like `load`, of a private stack: what PRIVATE names is as it says there, unless a flag says otherwise."""
        return cls.load(**PRIVATE | {name: value for name, value in flags.items() if value is not None})

    @property
    def announced_host(self) -> str:
        """The host that services tell the queue."""
        return self.advertise or self.host

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
        """Where the queue is: `store`, else the one of these settings."""
        return self.store or f"{'https://' if self.tls_cert else ''}{self.host}:{self.queue_port}"

    def with_ports(self, taken: Mapping[str, int] | None = None) -> Settings:
        """A copy in which every port that is 0 is a free one (or the one in `taken`), chosen now and kept from then on."""
        chosen: dict[str, int] = {name: getattr(self, name) or (taken or {}).get(name, 0) for name in PORTS}
        missing = [name for name, port in chosen.items() if not port]
        return self.model_copy(update=chosen | dict(zip(missing, free_ports(len(missing), self.host), strict=True)))

    def environment(self) -> dict[str, str]:
        """The AGL_* variables that make a child process load exactly these settings, empty ones included."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        values["data_dir"] = self.data_dir.absolute()
        values |= {name: Path(values[name]).absolute() for name in _FILES if values[name]}
        values |= {name: values[name].get_secret_value() for name in SECRETS}
        return {RESOLVED: "1", **{f"{PREFIX}{name.upper()}": str(value) for name, value in values.items()}}


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the AGL_* variables: what a child process may have of its parent's beside its settings."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports that nobody listens on, below those that the system hands out itself: no connection takes them meanwhile.

    On Linux they are held for RESERVED_SECONDS, so that no other process finds them free before they are listened on; a server that sets
    SO_REUSEADDR, as all do, may listen there. Raises InUseError where there are none.
    """
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
    """Whether the port was free. A bound socket keeps others from binding without SO_REUSEADDR, which is how free ports are looked for."""
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        holder.bind((host, port))
    except OSError:
        holder.close()
        return False
    if sys.platform != "linux":  # elsewhere a port that is bound is taken for all
        holder.close()
        return True
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of both sockets: then Linux lets the second one bind and listen
    _reserved.append((time.monotonic() + RESERVED_SECONDS, holder))
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """One of `free_ports`."""
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
    """Print a warning for each AGL_ variable that is nearly a setting. Others may belong to agents or to other parts of this project."""
    if RESOLVED in os.environ or "AGL_ROLLOUT_ID" in os.environ:  # a child of ours: its parent has warned
        return
    settings = {name.upper(): f"{PREFIX}{name.upper()}" for name in cls.model_fields}
    unknown = {name for name in os.environ if name.startswith(PREFIX)} - {*settings.values()} - _warned
    for variable in sorted(unknown):
        if near := difflib.get_close_matches(variable.removeprefix(PREFIX), settings, n=1, cutoff=MISTYPED):
            _warned.add(variable)
            text = f"warning: {variable} is no setting of agl-otel and is ignored; did you mean {settings[near[0]]}?"
            print(text, file=sys.stderr)  # noqa: T201 - logs are configured by settings


def parse_headers(text: str, setting: str) -> Mapping[str, str]:
    """`name=value,name=value`, values percent-decoded, names in lower case. Raises SettingsError without showing the values."""
    found: dict[str, str] = {}
    for number, pair in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise SettingsError(f"{setting}: entry {number} is not name=value")
        found[name.strip().lower()] = unquote(value.strip())
    return found

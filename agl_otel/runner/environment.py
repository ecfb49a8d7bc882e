"""Build the environment of an agent's process. Pure: plain data in, plain data out.

An unmodified agent finds its model, its task and its OTLP endpoint in the variables that SDKs read. The user's values are kept
where both can coexist; endpoint, headers and sampler are replaced, because spans sent elsewhere cannot be trained on. A model
provider's key never appears here: the proxy adds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from agl_otel.net.auth import attempt_ingest_key, attempt_key, shared_key
from agl_otel.runner.certificates import Certificates
from agl_otel.settings import RESOLVED, without_settings
from agl_otel.text import without_secrets
from agl_otel.types import LLM, AttemptedRollout, Describe, NamedResources, PromptTemplate, ProxyLLM, routed_base_url
from agl_otel.types.resources import is_canary
from agl_otel.types.sampling import for_agents
from agl_otel_hook import conventions, declared

DUMMY_API_KEY: Final = "agl-otel"
MODEL_KEYS: Final = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")
_ROOTS: Final = ("ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL")
"""Addresses whose SDKs add the version of the protocol themselves."""
"""SDKs refuse to start without a key; the proxy replaces it."""
PROTOCOLS: Final = ("http/protobuf", "grpc")
"""OTLP protocols that the collector speaks; the first is the one every SDK has."""

_STABILITY: Final = "OTEL_SEMCONV_STABILITY_OPT_IN"
_CAPTURE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_OTLP: Final = "OTEL_EXPORTER_OTLP_"
_OTLP_FILES: Final = (f"{_OTLP}CERTIFICATE", f"{_OTLP}CLIENT_CERTIFICATE", f"{_OTLP}CLIENT_KEY")
_CLEARED_PREFIXES: Final = (f"{_OTLP}TRACES_", f"{_OTLP}LOGS_")
_SECRETS: Final = (
    "AGL_TOKEN",
    "AGL_UPSTREAM_KEY",
    "AGL_FORWARD_HEADERS",
    "AGL_METRICS_OTLP_HEADERS",
    "AGL_QUEUE_URL",
    "AGL_CLICKHOUSE_URL",
)
"""Settings of the stack that hold a secret."""
_CLEARED: Final = (
    "OTEL_SDK_DISABLED",
    "OTEL_EXPERIMENTAL_CONFIG_FILE",
    "OTEL_TRACES_SAMPLER_ARG",
    "TRACESTATE",
    "ANTHROPIC_AUTH_TOKEN",
    *_SECRETS,
)


@dataclass(frozen=True, slots=True)
class Addresses:
    """The stack's addresses as an agent uses them."""

    collector_grpc: str
    """host:port, or https://host:port."""
    collector_http: str
    """http://host:port or https://host:port, without a path."""
    proxy: str | None = None
    """http(s)://host:port, without a path; None: model calls go directly to the resource's endpoint."""
    certificates: Certificates = field(default_factory=Certificates)
    """For the https:// addresses."""

    @classmethod
    def of(cls, describe: Describe, certificates: Certificates | None = None) -> Addresses | None:
        """Extract the addresses from the queue's description; None while no collector is up."""
        if describe.collector_grpc is None or describe.collector_http is None:
            return None
        proxy = describe.proxy.rstrip("/") if describe.proxy else None
        return cls(describe.collector_grpc, describe.collector_http.rstrip("/"), proxy, certificates or Certificates())


def first_llm(resources: NamedResources) -> LLM | ProxyLLM | None:
    """Return the first LLM among the resources that is no canary: the one that the proxy forwards to."""
    return next((r for r in resources.values() if isinstance(r, (LLM, ProxyLLM)) and not is_canary(r)), None)


def routed_llm(llm: LLM | ProxyLLM, rollout_id: str, attempt_id: str, proxy: str | None, *, token: str = "") -> LLM:
    """Return `llm` with the proxy's URL and key for this attempt instead of the provider's.

    Without a proxy, the resource's endpoint and key are kept (a ProxyLLM's endpoint is routed).
    """
    if proxy is None:
        endpoint, key = llm.get_base_url(rollout_id, attempt_id), llm.api_key or DUMMY_API_KEY
        return LLM(endpoint=endpoint, model=llm.model, api_key=key, sampling_parameters=llm.sampling_parameters)
    endpoint = routed_base_url(f"{proxy}/v1", rollout_id, attempt_id)
    key = attempt_key(token, rollout_id, attempt_id) if token else DUMMY_API_KEY
    return LLM(endpoint=endpoint, model=llm.model, api_key=key, sampling_parameters=for_agents(llm.sampling_parameters))


def attempt_llm(resources: NamedResources, rollout_id: str, attempt_id: str, proxy: str | None, *, token: str = "") -> LLM | None:
    """Return the attempt's model: the first LLM, routed; else the proxy, with the model name left to the agent; else None."""
    llm = first_llm(resources)
    if llm is None and proxy is None:
        return None
    return routed_llm(llm or LLM(endpoint=f"{proxy}/v1", model=""), rollout_id, attempt_id, proxy, token=token)


def agent_resources(resources: NamedResources, rollout_id: str, attempt_id: str, proxy: str | None, *, token: str = "") -> NamedResources:
    """Return the resources for the agent: the first LLM routed; with a proxy, the other LLMs without their secrets."""
    first = first_llm(resources)
    visible: NamedResources = {}
    for name, resource in resources.items():
        if isinstance(resource, PromptTemplate):
            visible[name] = resource
        elif resource is first:
            visible[name] = routed_llm(resource, rollout_id, attempt_id, proxy, token=token)
        else:
            visible[name] = without_keys(resource) if proxy is not None else resource
    return visible


def without_keys(llm: LLM | ProxyLLM) -> LLM | ProxyLLM:
    """Return `llm` without its secrets, which only the proxy uses."""
    public = {"endpoint": without_secrets(llm.endpoint), "api_key": None, "sampling_parameters": for_agents(llm.sampling_parameters)}
    return llm.model_copy(update=public)


def process_environment(
    base: Mapping[str, str],
    rollout: AttemptedRollout,
    resources: NamedResources,
    addresses: Addresses,
    *,
    traceparent: str,
    token: str = "",
) -> dict[str, str]:
    """Build the environment of one attempt's process.

    Args:
        base: the user's environment.
        rollout: the claimed rollout with its attempt.
        resources: the rollout's resources, as the queue stores them.
        addresses: of the stack.
        traceparent: W3C trace context of the attempt's root span.
        token: the stack's bearer token (empty: none). The agent gets keys derived from it, for telemetry and for model calls.
    """
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    ids = {conventions.ROLLOUT_ID: rollout_id, conventions.ATTEMPT_ID: attempt_id}
    visible = agent_resources(resources, rollout_id, attempt_id, addresses.proxy, token=token)
    env = telemetry_environment(base, addresses, token=attempt_ingest_key(token, rollout_id, attempt_id))
    env |= {
        conventions.ENV_ROLLOUT_ID: rollout_id,
        conventions.ENV_ATTEMPT_ID: attempt_id,
        conventions.ENV_TASK: json.dumps(rollout.input),
        conventions.ENV_RESOURCES: json.dumps({name: resource.model_dump(exclude_none=True) for name, resource in visible.items()}),
        "OTEL_RESOURCE_ATTRIBUTES": merged_members(base.get("OTEL_RESOURCE_ATTRIBUTES", ""), ids),
        "BAGGAGE": merged_members(base.get("BAGGAGE", ""), ids),
        "TRACEPARENT": traceparent,
    }
    env |= model_certificates(addresses)
    llm = attempt_llm(resources, rollout_id, attempt_id, addresses.proxy, token=token)
    if llm is not None:
        env |= llm_environment(llm, root=addresses.proxy and routed_base_url(addresses.proxy, rollout_id, attempt_id))
    return env


def llm_environment(llm: LLM, *, root: str | None = None) -> dict[str, str]:
    """Build the variables that point model SDKs at `llm`. `root` is the base URL of Anthropic's and Google's protocols, where served."""
    env = {
        "OPENAI_BASE_URL": llm.endpoint,
        "OPENAI_API_BASE": llm.endpoint,
        "OPENAI_API_KEY": llm.api_key or DUMMY_API_KEY,
    }
    if llm.model:  # empty: the agent chooses
        env["OPENAI_MODEL"] = llm.model
    if root:
        key = llm.api_key or DUMMY_API_KEY
        env |= {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": key, "GOOGLE_GEMINI_BASE_URL": root, "GEMINI_API_KEY": key}
    return env


def model_certificates(addresses: Addresses) -> dict[str, str]:
    """Build the variables that make model SDKs trust the proxy's private certificate authority."""
    bundle = addresses.certificates.bundle
    if not bundle or not (addresses.proxy or "").startswith("https://"):
        return {}
    return {"SSL_CERT_FILE": bundle, "REQUESTS_CA_BUNDLE": bundle, "NODE_EXTRA_CA_CERTS": bundle}


def shared_environment(base: Mapping[str, str], addresses: Addresses, *, token: str = "") -> dict[str, str]:
    """Build the variables for a process that runs many attempts at once (function agents): the proxy's URL without attempt ids.

    Baggage carries the ids. Only variables to set are returned. The user's API keys are kept unless the stack has a token, because
    the proxy then requires its own key.
    """
    if addresses.proxy is None:
        return {}
    url = f"{addresses.proxy}/v1"
    addressed = {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, **dict.fromkeys(_ROOTS, addresses.proxy)}
    env = addressed | model_certificates(addresses)
    if token:
        return env | dict.fromkeys(MODEL_KEYS, shared_key(token))
    return env | {name: DUMMY_API_KEY for name in MODEL_KEYS if not base.get(name)}


def telemetry_environment(base: Mapping[str, str], addresses: Addresses, *, token: str = "") -> dict[str, str]:
    """Return `base` with OpenTelemetry's variables set so that all traces and logs go to the collector, unsampled.

    The user's OTLP metrics keep their endpoint: the collector takes none.
    """
    users = without_settings(base) if RESOLVED in base else base  # RESOLVED: a supervisor put the runner's settings there
    env = {name: value for name, value in users.items() if name not in _CLEARED and not name.startswith(_CLEARED_PREFIXES)}
    env |= _users_metrics(base)
    protocol = base.get(f"{_OTLP}PROTOCOL", "")
    protocol = protocol if protocol in PROTOCOLS else PROTOCOLS[0]  # the user's choice: its exporter is installed
    env |= {
        f"{_OTLP}ENDPOINT": _with_scheme(addresses.collector_grpc) if protocol == "grpc" else addresses.collector_http,
        f"{_OTLP}PROTOCOL": protocol,
        "OTEL_TRACES_SAMPLER": "always_on",
        "OTEL_TRACES_EXPORTER": with_otlp(base.get("OTEL_TRACES_EXPORTER", "")),
        "OTEL_LOGS_EXPORTER": with_otlp(base.get("OTEL_LOGS_EXPORTER", "")),
    }
    env.setdefault("OTEL_METRICS_EXPORTER", "none")
    if base.get(_CAPTURE, "").strip().lower() != "true":  # the latest conventions know other values, and capture nothing for this one
        env[_STABILITY] = with_latest_genai(base.get(_STABILITY, ""))
    if env.get(declared.VARIABLE):
        env.setdefault(declared.CONFIGURATOR, "agl_otel")
    files = addresses.certificates if addresses.collector_http.startswith("https://") else Certificates()
    for name, path in zip(_OTLP_FILES, (files.authority, files.certificate, files.key), strict=True):
        env.pop(name, None)  # the user's file belongs to the user's endpoint
        env |= {name: path} if path else {}
    env.pop(conventions.ENV_OTLP_HTTP, None)  # of another runner, whose agent this one is
    if protocol == "grpc":
        env[conventions.ENV_OTLP_HTTP] = addresses.collector_http
    env.pop(f"{_OTLP}HEADERS", None)
    if token:
        env[f"{_OTLP}HEADERS"] = f"authorization={quote(f'Bearer {token}', safe='')}"
    return env


def with_otlp(exporters: str) -> str:
    """Add `otlp` to a comma-separated list of exporters, and remove `none`."""
    names = [name for name in (part.strip() for part in exporters.split(",")) if name and name != "none"]
    return ",".join(names if any(name.startswith("otlp") for name in names) else [*names, "otlp"])


def with_latest_genai(opted: str) -> str:
    """Add OpenTelemetry's latest conventions for generative AI to the conventions opted into, unless there is a choice among those."""
    names = [name for name in (part.strip() for part in opted.split(",")) if name]
    return ",".join(names if any(name.startswith("gen_ai") for name in names) else [*names, "gen_ai_latest_experimental"])


def merged_members(text: str, ours: Mapping[str, str]) -> str:
    """Merge `ours`, percent-encoded, into a `key=value,…` list (resource attributes, W3C baggage); other members are unchanged."""
    return ",".join([*_without(text, ours), *(f"{key}={quote(value, safe=':')}" for key, value in ours.items())])


def _with_scheme(address: str) -> str:
    return address if "://" in address else f"http://{address}"


def _without(text: str, keys: Iterable[str]) -> list[str]:
    return [member.strip() for member in text.split(",") if member.strip() and member.split("=", 1)[0].strip() not in keys]


def _users_metrics(base: Mapping[str, str]) -> dict[str, str]:
    """Build the metrics-specific variables that keep the user's OTLP metrics at the user's endpoint, without the stack's token."""
    if "otlp" not in base.get("OTEL_METRICS_EXPORTER", ""):
        return {}
    endpoint, protocol = base.get(f"{_OTLP}ENDPOINT"), base.get(f"{_OTLP}PROTOCOL")
    env = {f"{_OTLP}METRICS_HEADERS": base.get(f"{_OTLP}METRICS_HEADERS", base.get(f"{_OTLP}HEADERS", ""))}
    if endpoint is not None and f"{_OTLP}METRICS_ENDPOINT" not in base:
        env[f"{_OTLP}METRICS_ENDPOINT"] = endpoint if protocol == "grpc" else f"{endpoint.rstrip('/')}/v1/metrics"
    if protocol is not None and f"{_OTLP}METRICS_PROTOCOL" not in base:
        env[f"{_OTLP}METRICS_PROTOCOL"] = protocol
    for name in _OTLP_FILES:
        for_metrics = name.replace(_OTLP, f"{_OTLP}METRICS_")
        if name in base and for_metrics not in base:
            env[for_metrics] = base[name]
    return env

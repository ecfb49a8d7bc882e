"""The variables of an agent's process, one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import pytest
from opentelemetry.sdk.resources import OTELResourceDetector

from agl_otel.net.auth import attempt_ingest_key, attempt_key
from agl_otel.runner.certificates import Certificates
from agl_otel.runner.environment import (
    DUMMY_API_KEY,
    Addresses,
    agent_resources,
    attempt_llm,
    merged_members,
    process_environment,
    routed_llm,
    shared_environment,
    telemetry_environment,
    with_otlp,
)
from agl_otel.types import LLM, Attempt, AttemptedRollout, Describe, NamedResources, PromptTemplate, ProxyLLM
from agl_otel.types.sampling import NEUTRAL, all_parameters
from agl_otel_hook import conventions

ADDRESSES = Addresses("10.0.0.1:4317", "http://10.0.0.1:4318", "http://10.0.0.1:4000")
NO_PROXY = Addresses("10.0.0.1:4317", "http://10.0.0.1:4318")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REAL = LLM(endpoint="https://api.example.com/v1", model="gpt-x", api_key="sk-secret")
ROUTED = "http://10.0.0.1:4000/rollout/ro-1/attempt/at-1"


def rollout(task: object = "2 + 2?") -> AttemptedRollout:
    attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0)
    return AttemptedRollout(rollout_id="ro-1", input=task, start_time=0.0, attempt=attempt)


def environment(
    base: Mapping[str, str], resources: NamedResources | None = None, *, task: object = "2 + 2?", token: str = ""
) -> dict[str, str]:
    resources = {"main": REAL} if resources is None else resources
    return process_environment(base, rollout(task), resources, ADDRESSES, traceparent=TRACEPARENT, token=token)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AGL_ROLLOUT_ID", "ro-1"),
        ("AGL_ATTEMPT_ID", "at-1"),
        ("AGL_TASK", '"2 + 2?"'),
        ("OPENAI_BASE_URL", f"{ROUTED}/v1"),
        ("OPENAI_API_BASE", f"{ROUTED}/v1"),
        ("OPENAI_MODEL", "gpt-x"),
        ("OPENAI_API_KEY", DUMMY_API_KEY),
        ("ANTHROPIC_BASE_URL", ROUTED),
        ("GOOGLE_GEMINI_BASE_URL", ROUTED),
        ("GEMINI_API_KEY", DUMMY_API_KEY),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://10.0.0.1:4318"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_RESOURCE_ATTRIBUTES", "agentlightning.rollout_id=ro-1,agentlightning.attempt_id=at-1"),
        ("BAGGAGE", "agentlightning.rollout_id=ro-1,agentlightning.attempt_id=at-1"),
        ("TRACEPARENT", TRACEPARENT),
        ("OTEL_TRACES_SAMPLER", "always_on"),
        ("OTEL_TRACES_EXPORTER", "otlp"),
        ("OTEL_LOGS_EXPORTER", "otlp"),
        ("OTEL_METRICS_EXPORTER", "none"),
    ],
)
def test_every_variable_of_the_contract_is_set(name: str, value: str) -> None:
    assert environment({})[name] == value


OURS = "agentlightning.rollout_id=ro-1,agentlightning.attempt_id=at-1"
OTLP = "OTEL_EXPORTER_OTLP_"


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"PATH": "/bin", "HOME": "/home/a"}, {"PATH": "/bin", "HOME": "/home/a"}),
        ({"OTEL_TRACES_EXPORTER": "console"}, {"OTEL_TRACES_EXPORTER": "console,otlp"}),
        ({"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_TRACES_EXPORTER": "otlp"}),
        ({"OTEL_LOGS_EXPORTER": "otlp, console"}, {"OTEL_LOGS_EXPORTER": "otlp,console"}),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, {"OTEL_METRICS_EXPORTER": "prometheus"}),
        ({"OTEL_TRACES_SAMPLER": "traceidratio"}, {"OTEL_TRACES_SAMPLER": "always_on"}),
        ({"OTEL_TRACES_SAMPLER_ARG": "0.1"}, {"OTEL_TRACES_SAMPLER_ARG": None}),
        ({"OTEL_SDK_DISABLED": "true"}, {"OTEL_SDK_DISABLED": None}),
        ({"OTEL_CONFIG_FILE": "a.yaml"}, {"OTEL_CONFIG_FILE": "a.yaml", "OTEL_PYTHON_CONFIGURATOR": "agl_otel"}),
        ({"OTEL_CONFIG_FILE": "a.yaml", "OTEL_PYTHON_CONFIGURATOR": "own"}, {"OTEL_PYTHON_CONFIGURATOR": "own"}),
        ({"OTEL_CONFIG_FILE": ""}, {"OTEL_PYTHON_CONFIGURATOR": None}),
        ({"OTEL_EXPERIMENTAL_CONFIG_FILE": "a.yaml"}, {"OTEL_EXPERIMENTAL_CONFIG_FILE": None}),
        ({"TRACESTATE": "a=b", "TRACEPARENT": "old"}, {"TRACESTATE": None, "TRACEPARENT": TRACEPARENT}),
        (
            {f"{OTLP}TRACES_ENDPOINT": "https://vendor", f"{OTLP}TRACES_HEADERS": "k=v"},
            {f"{OTLP}TRACES_ENDPOINT": None, f"{OTLP}TRACES_HEADERS": None},
        ),
        ({f"{OTLP}LOGS_PROTOCOL": "grpc"}, {f"{OTLP}LOGS_PROTOCOL": None}),
        ({f"{OTLP}HEADERS": "api-key=vendor-secret"}, {f"{OTLP}HEADERS": None}),
        ({f"{OTLP}PROTOCOL": "grpc"}, {f"{OTLP}ENDPOINT": "http://10.0.0.1:4317", f"{OTLP}PROTOCOL": "grpc"}),
        ({f"{OTLP}PROTOCOL": "grpc"}, {"AGL_OTLP_HTTP": "http://10.0.0.1:4318"}),
        ({"AGL_OTLP_HTTP": "http://outer:1"}, {"AGL_OTLP_HTTP": None}),
        ({f"{OTLP}PROTOCOL": "http/json"}, {f"{OTLP}PROTOCOL": "http/protobuf"}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=a%2Cb,agentlightning.rollout_id=outer"}, {"OTEL_RESOURCE_ATTRIBUTES": f"team=a%2Cb,{OURS}"}),
        ({"BAGGAGE": "user=7;p=1 , agentlightning.attempt_id=outer"}, {"BAGGAGE": f"user=7;p=1,{OURS}"}),
        ({"AGL_ROLLOUT_ID": "outer", "OPENAI_API_KEY": "sk-users-own"}, {"AGL_ROLLOUT_ID": "ro-1", "OPENAI_API_KEY": DUMMY_API_KEY}),
        ({"ANTHROPIC_API_KEY": "sk-ant", "ANTHROPIC_AUTH_TOKEN": "t"}, {"ANTHROPIC_API_KEY": DUMMY_API_KEY, "ANTHROPIC_AUTH_TOKEN": None}),
    ],
)
def test_the_users_variables_are_kept_or_replaced(base: dict[str, str], expected: dict[str, str | None]) -> None:
    env = environment(base)
    assert {name: env.get(name) for name in expected} == expected


def test_the_attempts_key_is_the_only_header_and_percent_encoded() -> None:
    env = environment({"OTEL_EXPORTER_OTLP_HEADERS": "api-key=vendor-secret"}, token="a b,c")
    key, _, value = env["OTEL_EXPORTER_OTLP_HEADERS"].partition("=")
    assert (key, unquote(value)) == ("authorization", f"Bearer {attempt_ingest_key('a b,c', 'ro-1', 'at-1')}")
    assert "," not in value and "/" not in value


def test_no_variable_of_an_agent_contains_the_stacks_token() -> None:
    env = environment({"AGL_TOKEN": "stack-secret", "AGL_QUEUE_URL": "postgresql://u:stack-secret@h/d"}, token="stack-secret")
    assert not [name for name, value in env.items() if "stack-secret" in unquote(value)]
    assert len({attempt_ingest_key("stack-secret", "ro-1", "at-1"), env["OPENAI_API_KEY"], "stack-secret"}) == 3


def test_the_users_otlp_metrics_keep_their_endpoint_and_get_no_token() -> None:
    base = {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "https://vendor/", "OTEL_EXPORTER_OTLP_HEADERS": "k=v"}
    env = telemetry_environment(base, ADDRESSES, token="ours")
    assert env["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] == "https://vendor/v1/metrics"
    assert env["OTEL_EXPORTER_OTLP_METRICS_HEADERS"] == "k=v"
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://10.0.0.1:4318"


def test_a_providers_key_and_endpoint_never_reach_the_agent() -> None:
    other = LLM(endpoint="https://judge.example.com/v1", model="judge", api_key="sk-judge")
    env = environment({}, {"prompt": PromptTemplate(template="{x}", engine="f-string"), "main": REAL, "judge": other})
    assert not any("sk-secret" in value or "sk-judge" in value or "api.example.com" in value for value in env.values())
    resources = json.loads(env["AGL_RESOURCES"])
    assert resources["main"]["endpoint"] == f"{ROUTED}/v1"
    assert resources["prompt"]["template"] == "{x}"


STABILITY, CAPTURE = "OTEL_SEMCONV_STABILITY_OPT_IN", "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
SECRET = "zQ81hunter2notforagents"


@pytest.mark.parametrize("kind", [LLM, ProxyLLM])
@pytest.mark.parametrize(
    "given",
    [
        {"api_key": SECRET},
        {"endpoint": f"http://user:{SECRET}@models.example/v1"},
        {"endpoint": f"http://models.example/v1?api_key={SECRET}"},
        {"sampling_parameters": {"extra_headers": {"Authorization": f"Bearer {SECRET}"}}},
        {"sampling_parameters": {"extra_headers": {"X-Api-Key": SECRET}}},
        {"sampling_parameters": {"extra_headers": {"Ocp-Apim-Subscription-Key": SECRET}}},
        {"sampling_parameters": {"extra_query": {"api_key": SECRET}}},
        {"sampling_parameters": {"extra_body": {"provider": {"api_key": SECRET}}}},
        {"sampling_parameters": {"api_key": SECRET, "api_base": f"http://user:{SECRET}@models.example/v1"}},
    ],
)
def test_no_form_of_a_providers_key_reaches_an_agent_behind_a_proxy(kind: type[LLM] | type[ProxyLLM], given: dict[str, Any]) -> None:
    plain = {"endpoint": "http://models.example/v1", "model": "m"}
    sampling = {"temperature": 0.5, **given.get("sampling_parameters", {})}
    secret = kind.model_validate({**plain, **given, "sampling_parameters": sampling})
    published: list[NamedResources] = [{"main": secret}, {"main": REAL, "judge": secret}]
    for resources in published:
        env = environment({}, resources)
        assert not [name for name, value in env.items() if SECRET in value]
        visible = agent_resources(resources, "ro-1", "at-1", "http://p", token="t")
        assert SECRET not in repr({name: resource.model_dump() for name, resource in visible.items()})
        assert all(isinstance(llm, LLM) and "(secret" not in repr(llm.sampling_parameters) for llm in visible.values())
        last = list(visible.values())[-1]
        assert isinstance(last, LLM) and last.sampling_parameters == {"temperature": 0.5}, "no placeholder, which an agent would send"
        without = agent_resources(resources, "ro-1", "at-1", None)
        assert SECRET in repr({name: resource.model_dump() for name, resource in without.items()}), "an agent without a proxy needs it"


@pytest.mark.parametrize("kind", [LLM, ProxyLLM])
def test_both_kinds_of_llm_are_routed(kind: type[LLM] | type[ProxyLLM]) -> None:
    assert environment({}, {"llm": kind(endpoint="http://vllm/v1", model="m")})["OPENAI_BASE_URL"] == f"{ROUTED}/v1"


def test_without_an_llm_resource_the_agent_names_the_model_at_the_proxy() -> None:
    env = environment({"OPENAI_API_KEY": "sk-own", "OPENAI_MODEL": "mine"}, {})
    named = {"OPENAI_BASE_URL": f"{ROUTED}/v1", "OPENAI_API_KEY": DUMMY_API_KEY, "ANTHROPIC_BASE_URL": ROUTED, "OPENAI_MODEL": "mine"}
    assert named.items() <= env.items()
    assert environment({}, {}, token="t")["OPENAI_API_KEY"] == attempt_key("t", "ro-1", "at-1")
    assert "OPENAI_MODEL" not in environment({}, {})


def test_without_an_llm_and_a_proxy_the_users_model_variables_are_kept() -> None:
    env = process_environment({"OPENAI_API_KEY": "sk-own"}, rollout(), {}, NO_PROXY, traceparent=TRACEPARENT)
    assert (env["OPENAI_API_KEY"], "OPENAI_BASE_URL" in env) == ("sk-own", False)


def test_without_a_proxy_the_resources_endpoint_and_key_are_used() -> None:
    env = process_environment({}, rollout(), {"main": REAL}, NO_PROXY, traceparent=TRACEPARENT)
    assert (env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"]) == ("https://api.example.com/v1", "sk-secret")
    assert "ANTHROPIC_BASE_URL" not in env


def test_any_task_survives_the_environment_as_json() -> None:
    task = {"question": 'naïve "quotes"\n\x00 \ud800', "n": [1, 2.5, None]}
    text = environment({}, task=task)["AGL_TASK"]
    assert json.loads(text) == task
    assert text.isascii()
    assert "\x00" not in text


def test_resource_attributes_are_read_back_by_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", merged_members("team=blue", {conventions.ROLLOUT_ID: "ro:1._-", conventions.ATTEMPT_ID: "a,b=c"})
    )
    found = OTELResourceDetector().detect().attributes
    assert found == {"team": "blue", conventions.ROLLOUT_ID: "ro:1._-", conventions.ATTEMPT_ID: "a,b=c"}


def test_otlp_exporters_are_not_duplicated() -> None:
    assert with_otlp("otlp_proto_http") == "otlp_proto_http"
    assert with_otlp("") == with_otlp("none") == "otlp"


@pytest.mark.parametrize(
    ("users", "set_to"),
    [
        ({}, "gen_ai_latest_experimental"),
        ({STABILITY: "http/dup, database"}, "http/dup,database,gen_ai_latest_experimental"),
        ({STABILITY: "gen_ai_latest_experimental,http"}, "gen_ai_latest_experimental,http"),
        ({STABILITY: "gen_ai"}, "gen_ai"),
        ({CAPTURE: "span_only"}, "gen_ai_latest_experimental"),
        ({CAPTURE: "true"}, None),  # older conventions' value, with which the latest ones leave messages out
        ({CAPTURE: "True", STABILITY: "http"}, "http"),
    ],
)
def test_agents_write_the_latest_conventions_unless_they_chose_others(users: dict[str, str], set_to: str | None) -> None:
    assert telemetry_environment(users, ADDRESSES).get(STABILITY) == set_to


def test_a_shared_process_reaches_the_proxy_without_ids_and_keeps_the_users_key() -> None:
    assert shared_environment({"OPENAI_API_KEY": "mine"}, ADDRESSES) == {
        "OPENAI_BASE_URL": "http://10.0.0.1:4000/v1",
        "OPENAI_API_BASE": "http://10.0.0.1:4000/v1",
        "ANTHROPIC_BASE_URL": "http://10.0.0.1:4000",
        "ANTHROPIC_API_KEY": DUMMY_API_KEY,
        "GOOGLE_GEMINI_BASE_URL": "http://10.0.0.1:4000",
        "GEMINI_API_KEY": DUMMY_API_KEY,
    }
    assert shared_environment({}, NO_PROXY) == {}


def test_there_are_no_addresses_while_no_collector_is_up() -> None:
    assert Addresses.of(Describe(queue="127.0.0.1:1")) is None
    found = Addresses.of(Describe(queue="q:1", collector_grpc="c:2", collector_http="http://c:3/", proxy="http://p:4/"))
    assert found == Addresses("c:2", "http://c:3", "http://p:4")


def test_an_agent_gets_the_stacks_certificates_and_keeps_its_own_for_its_metrics() -> None:
    files = Certificates("/ca.pem", "/client.pem", "/client.key", "/bundle.pem")
    secure = Addresses("https://10.0.0.1:4317", "https://10.0.0.1:4318", "https://10.0.0.1:4000", files)
    users = {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/theirs.pem", "OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    env = process_environment(users, rollout(), {"main": REAL}, secure, traceparent=TRACEPARENT)
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://10.0.0.1:4317"
    assert [env[f"OTEL_EXPORTER_OTLP_{name}"] for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")] == [
        "/ca.pem", "/client.pem", "/client.key",
    ]  # fmt: skip
    assert env["OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE"] == "/theirs.pem"
    assert env["SSL_CERT_FILE"] == env["REQUESTS_CA_BUNDLE"] == "/bundle.pem"
    assert "SSL_CERT_FILE" in shared_environment({}, secure) and "SSL_CERT_FILE" not in shared_environment({}, ADDRESSES)
    plain = telemetry_environment(users, ADDRESSES)
    assert "OTEL_EXPORTER_OTLP_CERTIFICATE" not in plain, "a certificate of the user's is for the user's endpoint"


def test_an_agent_does_not_inherit_the_secrets_of_the_stack() -> None:
    secrets = dict.fromkeys(
        ("AGL_TOKEN", "AGL_UPSTREAM_KEY", "AGL_FORWARD_HEADERS", "AGL_METRICS_OTLP_HEADERS", "AGL_QUEUE_URL", "AGL_CLICKHOUSE_URL"),
        "s3cret",
    )
    assert "s3cret" not in environment({**secrets, "AGL_EMITTER_DEBUG": "1"}).values()


def test_sampling_parameters_unknown_to_openais_client_stay_with_the_proxy() -> None:
    told = routed_llm(REAL.model_copy(update={"sampling_parameters": all_parameters(0.7, 64, top_k=20)}), "ro-1", "at-1", "http://p")
    openais = {"temperature": 0.7, "max_tokens": 64, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert told.sampling_parameters == {**openais, "top_k": 20}, "what says nothing new would only break create(**sampling_parameters)"
    assert set(NEUTRAL) < set(
        routed_llm(LLM(endpoint="x", model="m", sampling_parameters=all_parameters(1, 1)), "r", "a", None).sampling_parameters
    )


def test_a_canary_is_not_the_agents_model_wherever_it_stands() -> None:
    canary = LLM(endpoint="http://new/v1", model="new", share=0.1)
    resources: NamedResources = {"next": canary, "main": LLM(endpoint="http://old/v1", model="old")}
    llm = attempt_llm(resources, "ro-1", "at-1", "http://proxy:4000")
    assert llm is not None and llm.model == "old"
    visible = agent_resources(resources, "ro-1", "at-1", "http://proxy:4000")
    assert visible["main"] == llm and visible["next"] == canary

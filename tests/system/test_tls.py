"""A stack whose ports all use TLS, with certificates that only the stack trusts, from `up` to a rollout that was run and read."""

from __future__ import annotations

import json
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.authority import Authority
from tests.model_server import ModelServer
from tests.system.stack_process import Command, naming, run, until
from tests.system.test_up import FREE_PORTS, stack_file

pytestmark = [pytest.mark.full, pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")]
AGENT = Path(__file__).parents[2] / "examples" / "first_light" / "agent.py"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.mark.timeout(1200)
def test_a_rollout_over_tls_with_a_token_and_client_certificates(tmp_path: Path, authority: Authority, model_server: ModelServer) -> None:
    data = tmp_path / "data"
    token = {"AGL_TOKEN": "sesame"}
    client = {**authority.dialling(mutual=True), **token}
    model = {"OPENAI_BASE_URL": model_server.url, "OPENAI_API_KEY": "sk-1"}
    arguments = ["up", "--data-dir", str(data), *FREE_PORTS]
    with Command(*arguments, log=tmp_path / "up.log", cwd=tmp_path, env={**authority.serving(mutual=True), **token}) as command:
        until(lambda: (data / "stack.json").exists() or command.process.poll() is not None, "stack.json is written")
        assert command.process.poll() is None, command.output
        addresses = {name: service["address"] for name, service in stack_file(data).items() if service["address"]}
        assert all(address.startswith("https://") for address in addresses.values()), addresses
        done = run(
            "run", "--json", "--store", addresses["web"], "--", sys.executable, str(AGENT), "hi", cwd=tmp_path, env={**client, **model}
        )
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert [verdict["kind"] for verdict in shown["verdicts"]] == ["complete"]
        assert {"openai.chat", "agentlightning.llm"} <= {span["name"] for span in shown["spans"]}
        without_scheme = addresses["queue"].removeprefix("https://")
        for command_line in (["collector", "status"], ["traces", "sql", "SELECT 1"]):
            looked = run(*command_line, "--store", without_scheme, cwd=tmp_path, env=client)
            assert looked.returncode == 0, looked.stderr

        other = Authority(tmp_path / "other")
        for store, environment, words in (
            (addresses["queue"], {**client, "AGL_TLS_CA": other.path("ca.pem")}, "AGL_TLS_CA"),
            (addresses["web"], {**client, "AGL_TLS_CA": other.path("ca.pem")}, "AGL_TLS_CA"),
            (without_scheme, token, "https://"),
            (addresses["web"].replace("https://", "http://"), token, "https://"),
            (addresses["queue"], {**client, "AGL_TOKEN": "wrong"}, "AGL_TOKEN"),
            (addresses["web"], {**client, "AGL_TLS_CA": str(tmp_path / "none.pem")}, "none.pem"),
            (addresses["queue"], {**authority.dialling(), **token}, "AGL_TLS_CLIENT_CERT"),
        ):
            refused = run("rollouts", "--store", store, cwd=tmp_path, env=environment)
            assert refused.returncode in (1, 2) and words in refused.stderr and "Traceback" not in refused.stderr, (store, refused.stderr)
    assert naming(data) == []


def test_certificates_that_our_own_clients_reject_are_refused_before_the_start(tmp_path: Path, authority: Authority) -> None:
    data = tmp_path / "data"
    good = authority.serving()
    elsewhere = Authority(tmp_path / "elsewhere", names="DNS:elsewhere.example")
    for environment, words in (
        ({name: value for name, value in good.items() if name != "AGL_TLS_CA"}, "AGL_TLS_CA"),
        (elsewhere.serving(), "127.0.0.1"),
        ({**good, "AGL_TLS_CLIENT_CA": authority.path("ca.pem")}, "AGL_TLS_CLIENT_CERT"),
        ({**good, "AGL_TLS_KEY": ""}, "AGL_TLS_KEY"),
        ({**good, "AGL_PROXY_CLIENT_CERTIFICATES": "1"}, "AGL_TLS_CLIENT_CA"),
    ):
        refused = run("up", "--data-dir", str(data), *FREE_PORTS, cwd=tmp_path, env=environment)
        assert refused.returncode == 2 and words in refused.stderr and "Traceback" not in refused.stderr, refused.stderr
    assert naming(data) == []


SHOWING = """
import os, ssl, openai
context = ssl.create_default_context(cafile=os.environ["CA"])
context.load_cert_chain(os.environ["CERT"], os.environ["KEY"])
client = openai.OpenAI(http_client=openai.DefaultHttpxClient(verify=context))
print(client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}]).choices[0].message.content)
"""


@pytest.mark.timeout(1200)
def test_the_proxy_requires_client_certificates_if_configured(tmp_path: Path, authority: Authority, model_server: ModelServer) -> None:
    data = tmp_path / "data"
    settings = {**authority.serving(mutual=True), "AGL_PROXY_CLIENT_CERTIFICATES": "true"}
    with Command("up", "--data-dir", str(data), *FREE_PORTS, log=tmp_path / "up.log", cwd=tmp_path, env=settings) as command:
        until(lambda: (data / "stack.json").exists() or command.process.poll() is not None, "stack.json is written")
        assert command.process.poll() is None, command.output
        addresses = {name: service["address"] for name, service in stack_file(data).items() if service["address"]}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{addresses['proxy']}/v1/models", context=authority.context(), timeout=300)
        assert refused.value.code == 401 and b"AGL_TLS_CLIENT_CA" in refused.value.read()
        assert urllib.request.urlopen(f"{addresses['proxy']}/health", context=authority.context(), timeout=300).status == 200
        model = {"OPENAI_BASE_URL": model_server.url, "OPENAI_API_KEY": "sk-1"}
        shown = {"CA": authority.path("ca.pem"), "CERT": authority.path("client.pem"), "KEY": authority.path("client.key")}
        agent = ["--", sys.executable, "-c", SHOWING]
        environment = {**authority.dialling(mutual=True), **model, **shown}
        done = run("run", "--json", "--store", addresses["web"], *agent, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert [verdict["kind"] for verdict in json.loads(done.stdout)["verdicts"]] == ["complete"]


def test_a_self_signed_certificate_is_accepted_as_its_own_authority(tmp_path: Path) -> None:
    alone = Authority(tmp_path / "alone")
    alone.self_signed("own")
    data = tmp_path / "data"
    environment = {"AGL_TLS_CERT": alone.path("own.pem"), "AGL_TLS_KEY": alone.path("own.key"), "AGL_TLS_CA": alone.path("own.pem")}
    with Command("up", "--data-dir", str(data), *FREE_PORTS, log=tmp_path / "up.log", cwd=tmp_path, env=environment) as command:
        until(lambda: (data / "stack.json").exists() or command.process.poll() is not None, "stack.json is written")
        looked = run("rollouts", "--json", "--data-dir", str(data), cwd=tmp_path, env={"AGL_TLS_CA": alone.path("own.pem")})
        assert json.loads(looked.stdout)["total"] == 0, command.output + looked.stderr

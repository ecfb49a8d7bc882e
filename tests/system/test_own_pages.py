"""By which host names, and from which pages, each HTTP port of a running stack may be called."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agl_otel.settings import free_ports
from tests.contract.web.conftest import Web
from tests.system.stack_process import Command, naming, until
from tests.system.test_model_server import Server, server
from tests.system.two_machines import Machine, two_machines

__all__ = ["server"]
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
TOKEN = "s3cret"
FREE_PORTS = ["--queue-port", "0", "--otlp-grpc-port", "0"]
POSTS = {
    "collector_http": ("/v1/traces", "/v1/logs", "/v1/metrics", "/barrier", "/delete", "/purge", "/copy", "/maintain"),
    "clickhouse": ("/",),
    "web": ("/v1/agl/queues/rollouts/enqueue", "/v1/agl/sql", "/v1/traces"),
    "queue_metrics": ("/health",),
    "model_server": ("/weights", "/v1/chat/completions"),
    "proxy": ("/model_list", "/close", "/pause", "/v1/chat/completions", "/rollout/ro-1/attempt/at-1/close"),
}
"""{port: paths that accept POST}."""
GETS = {
    "collector_http": "/health",
    "clickhouse": "/?query=SELECT%201",
    "web": "/v1/agl/rollouts",
    "queue_metrics": "/health",
    "proxy": "/health",
    "model_server": "/health",
}


@contextmanager
def stack(folder: Path, host: str = "127.0.0.1", within: Sequence[str] = (), **env: str) -> Generator[dict[str, str]]:
    """Run `agl-otel up`; yield {service: address} of the HTTP ports."""
    names = ("web", "otlp_http", "clickhouse", "queue_metrics", "proxy")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    env = {**{f"AGL_{name.upper()}_PORT": str(port) for name, port in ports.items()}, "AGL_HOST": host, **env}
    data = folder / "data"
    with Command("up", "--data-dir", str(data), *FREE_PORTS, log=folder / "up.log", cwd=folder, env=env, within=within) as command:
        until(lambda: (data / "stack.json").exists() or command.process.poll() is not None, "stack.json is written")
        assert command.process.poll() is None, command.output
        yield {{"otlp_http": "collector_http"}.get(name, name): f"http://{host}:{port}" for name, port in ports.items()}
    until(lambda: naming(data) == [], "nothing is left")


def status(address: str, path: str, *, token: str = "", post: bool = False, headers: Mapping[str, str] | None = None) -> int:
    """Return the status of one request; it is 403 exactly if its host name or its origin is refused."""
    answer = Web(address, token=token).call("POST" if post else "GET", path, b"SELECT 1" if post else None, headers)
    by_name = b"this service is not called" in answer.body or b"may not call this service" in answer.body
    assert by_name == (answer.status == 403), answer.body
    return answer.status


def test_without_a_token_a_port_accepts_only_its_own_host_names(tmp_path: Path) -> None:
    with stack(tmp_path, AGL_ALLOWED_HOSTS="stack.test, Other.Test") as addresses:
        for name, address in addresses.items():
            for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "[evil", "stack.test.evil"):
                assert status(address, GETS[name], headers={"Host": host}) == 403, (name, host)
                for path in POSTS[name]:
                    assert status(address, path, post=True, headers={"Host": host}) == 403, (name, path, host)
            for host in ("127.0.0.1:1", "[::1]:1", "localhost", "LOCALHOST:5", "192.0.2.7", "stack.test:9", "other.test"):
                assert status(address, GETS[name], headers={"Host": host}) == 200, (name, host)
            pages_of_others_post_nothing(name, address)


def test_with_a_token_any_host_name_is_accepted_and_other_origins_cannot_post(tmp_path: Path) -> None:
    with stack(tmp_path, AGL_TOKEN=TOKEN) as addresses:
        for name, address in addresses.items():
            pages_of_others_post_nothing(name, address, TOKEN)
            assert status(address, GETS[name], token=TOKEN, headers={"Host": "evil.example"}) == 200, name
            assert status(address, POSTS[name][0], post=True, headers={"Host": "evil.example"}) in (401, 405), name


def pages_of_others_post_nothing(name: str, address: str, token: str = "") -> None:
    """Check that pages of other origins can post nothing, even with the token and a request that needs no preflight."""
    for path in POSTS[name]:
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
            sent = {"Origin": origin, "Content-Type": "text/plain"}
            assert status(address, path, token=token, post=True, headers=sent) == 403, (name, path, origin)
    for site in ("cross-site", "same-site"):
        assert status(address, GETS[name], token=token, headers={"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}) == 403, (name, site)
    own = {"Origin": address, "Content-Type": "application/json"}
    assert status(address, POSTS[name][0], token=token, post=True, headers=own) != 403, name


def test_a_model_server_accepts_only_its_own_host_names(server: Server) -> None:
    """It has no token, so this holds whatever the stack's token is (tests/contract/algorithms/test_model_ports.py has the vLLM server)."""
    for host in ("evil.example", "127.0.0.1.evil.example", "[evil"):
        assert status(server.url, "/health", headers={"Host": host}) == 403, host
        assert status(server.url, "/weights", post=True, headers={"Host": host, "Content-Type": "text/plain"}) == 403, host
    assert status(server.url, "/health", headers={"Host": "localhost:9"}) == 200
    pages_of_others_post_nothing("model_server", server.url)


def test_a_host_name_of_loopback_is_accepted(tmp_path: Path) -> None:
    """Like Debian, which gives a machine's own name 127.0.1.1; here in a separate hosts file."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 debian-box\n")
    within = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts))
    tried = subprocess.run([*within, "true"], capture_output=True, check=False, text=True)
    if tried.returncode != 0:
        pytest.skip(f"a hosts file of its own needs a mount: {tried.stderr.strip()}")
    with stack(tmp_path, "debian-box", within) as addresses:
        for name, address in addresses.items():
            here = address.replace("debian-box", "127.0.1.1")
            assert status(here, GETS[name], headers={"Host": "evil.example"}) == 403, name
            for path in POSTS[name]:
                assert status(here, path, post=True, headers={"Host": "evil.example"}) == 403, (name, path)
            for host in ("debian-box", "DEBIAN-BOX:5", "127.0.1.1"):
                assert status(here, GETS[name], headers={"Host": host}) == 200, (name, host)


CALL = """
import json, sys, urllib.error, urllib.request
found = []
for url in sys.argv[1:]:
    try:
        found.append(urllib.request.urlopen(url, timeout=60).status)
    except urllib.error.HTTPError as error:
        found.append(error.code)
print(json.dumps(found))
"""
RELAY = """
import asyncio, sys
async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
async def main(host, *ports):
    def to(port):
        async def serve(reader, writer):
            inner = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, inner[1]), pump(inner[0], writer))
        return serve
    servers = [await asyncio.start_server(to(int(port)), host, int(port)) for port in ports]
    print("listening", flush=True)
    await asyncio.Event().wait()
asyncio.run(main(*sys.argv[1:]))
"""


def asked_there(there: Machine, hosts: Path, name: str, addresses: Mapping[str, str]) -> list[int]:
    """Return the status of each port, called by `name` from the other machine with its own hosts file."""
    urls = [f"http://{name}:{urlsplit(address).port}{GETS[port]}" for port, address in addresses.items()]
    shell = 'mount --bind "$0" /etc/hosts || exit 77; exec "$@"'
    command = [*there.enter, "unshare", "--mount", "sh", "-c", shell, str(hosts), sys.executable, "-c", CALL, *urls]
    done = subprocess.run(command, capture_output=True, check=False, timeout=300, text=True)
    if done.returncode == 77:
        pytest.skip(f"a hosts file of its own needs a mount: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_container_that_calls_by_host_name_is_answered(tmp_path: Path) -> None:
    """From another network namespace: by a name of the stack's address, and by one that a relay forwards to its loopback."""
    hosts = tmp_path / "hosts"
    with two_machines() as (here, there):
        hosts.write_text(f"127.0.0.1 localhost\n{here.address} stack.test host.containers.internal\n")
        beyond, within = tmp_path / "beyond", tmp_path / "within"
        beyond.mkdir()
        within.mkdir()
        with stack(beyond, here.address, here.enter) as addresses:
            assert asked_there(there, hosts, "stack.test", addresses) == [200] * len(addresses)
        with stack(within, within=here.enter, AGL_ALLOWED_HOSTS="host.containers.internal") as addresses:
            ports = [str(urlsplit(address).port) for address in addresses.values()]
            relay = subprocess.Popen([*here.enter, sys.executable, "-c", RELAY, here.address, *ports], stdout=subprocess.PIPE)
            try:
                assert relay.stdout is not None and relay.stdout.readline() == b"listening\n"
                for name, answer in (("host.containers.internal", 200), (here.address, 200), ("stack.test", 403)):
                    assert asked_there(there, hosts, name, addresses) == [answer] * len(addresses), name
            finally:
                relay.kill()
                relay.communicate()

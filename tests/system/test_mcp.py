"""MCP servers that an agent starts or calls: their spans belong to its attempt, below the call of the tool."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments import AbsentError, installed
from tests.otlp_receiver import OtlpReceiver, Received
from tests.system.hooked_agent import IDS, KEY, TRACE_ID, Agent, sealed_completely

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
MCP_2 = ("mcp==2.3.0", "opentelemetry-sdk==1.45.2")
MCP_1 = ("mcp==1.30.0", "opentelemetry-sdk==1.45.2", "opentelemetry-instrumentation-mcp==0.62.4")
SERVER = """
import sys
try:
    from mcp.server.fastmcp import FastMCP
except ImportError:  # mcp 2
    from mcp.server.mcpserver import MCPServer as FastMCP
from opentelemetry import trace

server = FastMCP("sums")

@server.tool()
def add(a: int, b: int) -> int:
    with trace.get_tracer("server").start_as_current_span("adding"):
        return a + b

if sys.argv[1:]:
    server.run("stdio")
else:
    import socket, uvicorn
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run([listening])
"""
CLIENT = """
import asyncio
from mcp import ClientSession, StdioServerParameters
from mcp.client import streamable_http
from mcp.client.stdio import stdio_client
from opentelemetry import trace

async def main():
    url = os.environ.get("MCP_URL")
    stdio = StdioServerParameters(command=sys.executable, args=["server.py", "stdio"])
    async with streamable_http.streamable_http_client(url) if url else stdio_client(stdio) as streams:
        async with ClientSession(*streams[:2]) as session:
            await session.initialize()
            with trace.get_tracer("agent").start_as_current_span("deciding"):
                found = await session.call_tool("add", {"a": 1, "b": 2})
            print(found.content[0].text)

asyncio.run(main())
"""


def python_with(packages: tuple[str, ...]) -> str:
    try:
        return str(installed("-".join(("mcp", *packages[:1])), packages) / "bin" / "python")
    except AbsentError as absent:
        pytest.skip(str(absent))


def path_up(spans: list[Received], name: str) -> list[str]:
    """The names of a span and of those above it."""
    by_id, (at,) = {span.span_id: span for span in spans}, [span for span in spans if span.name == name]
    names = [at.name]
    while at.parent_id in by_id:
        at = by_id[at.parent_id]
        names.append(at.name)
    return names


@pytest.mark.parametrize("packages", [MCP_2, MCP_1], ids=["mcp 2", "mcp 1 with its instrumentation"])
def test_spans_of_a_server_over_stdio_are_below_the_call_of_its_tool(
    receiver: OtlpReceiver, tmp_path: Path, packages: tuple[str, ...]
) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    agent = Agent(receiver, tmp_path, python=python_with(packages), injected=True)
    status, said, errors = agent.run(CLIENT, IDS)
    assert (status, said.strip()) == (0, "3"), errors
    assert_joined(receiver)
    assert sealed_completely(receiver)


def test_a_server_over_http_that_was_there_before_serves_the_attempt(receiver: OtlpReceiver, tmp_path: Path) -> None:
    folders = tmp_path / "server", tmp_path / "client"
    for folder in folders:
        folder.mkdir()
    serving, agent = (Agent(receiver, folder, python=python_with(MCP_2), injected=True) for folder in folders)
    with serving.start(SERVER, {}) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"
        status, said, errors = agent.run(CLIENT, {**IDS, "MCP_URL": url})
        assert (status, said.strip()) == (0, "3"), errors
        server.terminate()
    assert_joined(receiver)


def assert_joined(receiver: OtlpReceiver) -> None:
    """Assert that the server's span is one of the attempt, below the agent's call of the tool."""
    (deciding,), (adding,) = receiver.spans("deciding"), receiver.spans("adding")
    assert (adding.key, adding.trace_id, deciding.trace_id) == (KEY, TRACE_ID, TRACE_ID)
    assert adding.marker != deciding.marker
    names = path_up(receiver.ours(), "adding")
    assert names[-1] == "deciding" and any("tools/call" in name or "add" in name for name in names[1:-1]), names

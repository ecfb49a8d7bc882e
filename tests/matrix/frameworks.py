"""Which frameworks are played, in which modes, and what is expected of each: the table behind docs/frameworks.md.

An agent is agents/NAME/agent.py (or agent.js), written as its framework's users write theirs; beside it stand what it needs
(requirements.txt, or package.json) and, where the framework's own bounds forbid our packages beside it, overrides.txt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from tests.matrix.script import Task

AGENTS: Final = Path(__file__).parent / "agents"
ProtocolName = Literal["chat", "responses", "messages", "generateContent"]
Join = Literal["traceparent", "response id", "time", "address"]
"""How a call is joined to the agent's own spans: the header that named the span; its response id; the only span whose time encloses it, and
no other call; or none, so that the call's address tells its attempt and no more."""


@dataclass(frozen=True)
class Play:
    """One way to run an agent."""

    mode: str
    """The agent's first argument."""
    protocol: ProtocolName = "chat"
    streamed: bool = False
    calls: int = 3
    """Model calls: the tool twice, then the answer."""
    trajectories: int = 1
    """That they make."""
    breaks: tuple[str, ...] = ()
    """Why there are more than one (keys of adapters' SPLIT_REASONS)."""
    untrainable: tuple[str, ...] = ()
    """By which fields of sampling, or for which other reasons, training refuses calls."""
    joined: Join = "traceparent"
    """How the calls are joined to spans of the agent's own."""
    flushes: bool = True
    """Whether it sends all of these before it ends; else some calls are joined in another way."""
    task: Task = "tool"
    """What it asks for."""


@dataclass(frozen=True)
class Framework:
    """One row."""

    name: str
    """Of its folder in agents/."""
    title: str
    package: str
    """The one whose version is shown."""
    plays: tuple[Play, ...]
    instrumented_by: str
    """What is installed for the agent's own spans."""
    remark: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that its users set too."""
    program: str = "agent.py"

    @property
    def folder(self) -> Path:
        """Where its agent is."""
        return AGENTS / self.name

    @property
    def is_harness(self) -> bool:
        """Whether it is a command-line agent, which a script starts."""
        return self.program.endswith(".sh")


FRAMEWORKS: Final = (
    Framework(
        "openai",
        "OpenAI SDK",
        "openai",
        (
            Play("chat"),
            Play("chat-stream", streamed=True),
            Play("chat-async"),
            Play("chat-async-stream", streamed=True),
            # Other messages are sent back than the model's: no call goes on from another.
            Play("chat-edited", trajectories=3, breaks=("history_edited",)),
            Play("responses", "responses"),
            Play("responses-stream", "responses", streamed=True),
            Play("responses-async", "responses"),
        ),
        "opentelemetry-instrumentation-openai",
        "the agent's tool is `strict`.",
    ),
    Framework(
        "httpx",
        "plain httpx",
        "httpx",
        (Play("sync"), Play("async"), Play("stream", streamed=True)),
        "opentelemetry-instrumentation-httpx",
    ),
    Framework(
        "anthropic",
        "Anthropic SDK",
        "anthropic",
        tuple(Play(mode, "messages", streamed="stream" in mode) for mode in ("whole", "stream", "async", "async-stream")),
        "opentelemetry-instrumentation-anthropic",
    ),
    Framework(
        "langgraph",
        "LangChain, LangGraph",
        "langgraph",
        (
            Play("invoke"),
            Play("stream", streamed=True),
            Play("async"),
            Play("graph"),
            Play("mcp"),
            Play("responses", "responses"),
        ),
        "opentelemetry-instrumentation-langchain, -openai",
    ),
    Framework(
        "openai_agents",
        "openai-agents",
        "openai-agents",
        (
            Play("chat"),
            Play("chat-stream", streamed=True),
            Play("mcp"),
            Play("responses", "responses"),
            Play("responses-stream", "responses", streamed=True),
        ),
        "opentelemetry-instrumentation-openai-agents, -openai",
        "tools are `strict` by default, but those of MCP servers.",
    ),
    Framework(
        "pydantic_ai",
        "pydantic-ai",
        "pydantic-ai-slim",
        (
            Play("sync"),
            Play("async"),
            Play("stream", streamed=True),
            Play("responses", "responses"),
        ),
        "itself, opentelemetry-instrumentation-openai",
        "tools are `strict` by default.",
    ),
    Framework(
        "smolagents",
        "smolagents",
        "smolagents",
        tuple(
            Play(
                mode,
                streamed="stream" in mode,
                trajectories=3,
                breaks=("history_edited",),
                untrainable=("tool_choice",) if "tools" in mode else (),
            )
            for mode in ("tools", "tools-stream", "code", "code-stream")
        ),
        "openinference-instrumentation-smolagents, opentelemetry-instrumentation-openai",
        "it changes the model's messages in its history (`Calling tools: …`), so no call continues another: each is a trajectory. "
        '`ToolCallingAgent` sends `tool_choice = "required"`.',
    ),
    Framework(
        "autogen",
        "AutoGen AgentChat",
        "autogen-agentchat",
        (Play("run"), Play("stream", streamed=True)),
        "itself, opentelemetry-instrumentation-openai",
        "autogen-core asks for protobuf below 5.30 and this package for 6.31 or newer; both work with 6.x: "
        "`uv pip install --overrides` with [overrides.txt](../tests/matrix/agents/autogen/overrides.txt).",
    ),
    Framework(
        "agent_framework",
        "Microsoft Agent Framework",
        "agent-framework-core",
        (Play("chat"), Play("chat-stream", streamed=True), Play("responses", "responses")),
        "itself, opentelemetry-instrumentation-openai",
        environment={"ENABLE_INSTRUMENTATION": "true"},
    ),
    Framework(
        "crewai",
        "CrewAI",
        "crewai",
        (Play("run"), Play("stream", streamed=True)),
        "opentelemetry-instrumentation-crewai, -openai",
        "it makes its tools `strict`.",
    ),
    Framework(
        "llama_index",
        "LlamaIndex",
        "llama-index-core",
        (
            Play("function", streamed=True),
            Play("function-whole"),
            Play("react", streamed=True, trajectories=3, breaks=("history_edited",)),
            Play("responses", "responses", streamed=True),
        ),
        "opentelemetry-instrumentation-llamaindex, -openai",
        "`react` rewrites the model's thoughts (`{'city'` for `{\"city\"`), so no call continues another: each is a trajectory.",
    ),
    Framework(
        "node",
        "Node, OpenAI SDK",
        "openai",
        (Play("chat"), Play("chat-stream", streamed=True), Play("responses", "responses")),
        "@opentelemetry/auto-instrumentations-node",
        "runs without this package: ids come from `OTEL_RESOURCE_ATTRIBUTES`; the proxy counts calls, own spans are not counted.",
        program="agent.js",
    ),
)
BY_NAME: Final = {framework.name: framework for framework in FRAMEWORKS}

"""Record what real instrumentations write about one small agent, as JSON files in spans/: the tests of agl_otel/spans/dialects.

python tests/recordings/record.py [NAME …]     # all of them, or some; needs uv, and npm for the Node ones

Each agent of agents/ runs unmodified in a throw-away environment of its own (`uv run --no-project --with …`) against a scripted
OpenAI-compatible server, which answers a question with a tool call and the tool's answer with a sentence. A recording holds the
versions that made it; run this again after raising one in RECORDINGS, and read the difference.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[2]))  # for tests.model_server, when run as a script
from tests.model_server import Json, ModelServer

HERE: Final = Path(__file__).parent
TIMEOUT_SECONDS: Final = 900.0  # the first run downloads
OF_ITS_TIME: Final = {"UV_EXCLUDE_NEWER": "2026-01-15"}  # with the packages that 0.3 was released for
RECORDINGS: Final[dict[str, tuple[str, tuple[str, ...], dict[str, str]]]] = {
    "openllmetry": ("openllmetry", ("openai==3.52.0", "opentelemetry-instrumentation-openai==0.62.4"), {}),
    "openllmetry_flat": ("openllmetry", ("openai<2", "opentelemetry-instrumentation-openai==0.40.14", "setuptools<81"), {}),
    "openllmetry_langchain": (
        "langgraph_agent",
        (
            "langchain==1.*",
            "langgraph<1.3",
            "langchain-openai<1.7.4",
            "langchain-core<1.7.5",
            "opentelemetry-instrumentation-langchain==0.62.4",
        ),
        {},
    ),
    "gen_ai_events": (
        "gen_ai",
        ("openai<2", "opentelemetry-instrumentation-openai-v2==2.1b0", "opentelemetry-sdk<1.37"),
        {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"},
    ),
    "gen_ai_details": (
        "gen_ai",
        ("openai<2", "opentelemetry-instrumentation-openai-v2==2.4b0", "opentelemetry-util-genai<1", "opentelemetry-sdk"),
        {
            "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "EVENT_ONLY",
            "OTEL_INSTRUMENTATION_GENAI_EMIT_EVENT": "true",
        },
    ),
    "openinference": ("openinference_agent", ("openai==3.52.0", "openinference-instrumentation-openai==0.1.66"), {}),
    "langsmith": (
        "langsmith_agent",
        ("openai==3.52.0", "langsmith[otel]==0.15.0"),
        {"LANGSMITH_OTEL_ENABLED": "true", "LANGSMITH_OTEL_ONLY": "true", "LANGSMITH_TRACING": "true", "LANGSMITH_API_KEY": "none"},
    ),
    "pydantic_ai": ("pydantic_agent", ("pydantic-ai-slim[openai]==2.68.0",), {}),
    "openai_agents": ("openai_agent", ("openai-agents==0.24.0", "opentelemetry-instrumentation-openai-agents==0.62.4"), {}),
    "openai_agents_openinference": (
        "openai_agent",
        ("openai-agents==0.24.0", "openinference-instrumentation-openai-agents==2.6.0"),
        {},
    ),
    "litellm": ("litellm_agent", ("litellm==1.83.0", "opentelemetry-sdk"), {"USE_OTEL_LITELLM_REQUEST_SPAN": "true"}),
    "agent_lightning": ("agent_lightning", ("agentlightning==0.3.0",), OF_ITS_TIME),
    "agent_lightning_weave": ("agent_lightning_weave", ("agentlightning[weave]==0.3.0",), OF_ITS_TIME),
    "vercel": (
        "vercel.mjs",
        ("ai@6", "@ai-sdk/openai-compatible@2", "@opentelemetry/sdk-trace-base@2", "@opentelemetry/sdk-trace-node@2", "zod@4"),
        {},
    ),
}
"""Name of the recording → (its script in agents/, what is installed, environment)."""


ASKED: Final = {"logprobs": True, "return_token_ids": True}


class ToolServer(ModelServer):
    """Calls the tool when it has one and no answer of it yet; all replies carry token ids and log-probs, as vLLM's do when asked."""

    @staticmethod
    def reply(messages: Sequence[Json], choice: int) -> str:
        """The text of an answer."""
        return "Sunny."

    def _head(self, body: Json, kind: str, *, first: bool = True) -> Json:
        return {**super()._head({**body, **ASKED}, kind, first=first), "id": f"chatcmpl-{len(self.requests)}"}

    def _choice(self, body: Json, index: int, text: str, said: str, finish: str | None = "stop") -> Json:
        choice = super()._choice({**body, **ASKED}, index, text, said, finish)
        if body.get("tools") and not any(message["role"] == "tool" for message in body["messages"]):
            call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
            choice[said] = {"role": "assistant", "content": None}
            if said == "message" or finish is None:
                choice[said]["tool_calls"] = [{"index": 0, **call} if said == "delta" else call]
            choice["finish_reason"] = finish and "tool_calls"
        return choice


async def record(name: str, url: str) -> bool:
    """Run one agent; whether it wrote a recording."""
    script, wanted, extra = RECORDINGS[name]
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out.json"
        environment: Mapping[str, str] = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "VIRTUAL_ENV", "PYTHON"))},
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": "none",
            "RECORDING": str(out),
            **extra,
        }
        process = await asyncio.create_subprocess_exec(
            *_command(script, wanted, Path(place)),
            cwd=place,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_SECONDS)
        except TimeoutError:
            process.kill()
            said, _ = await process.communicate()
        if process.returncode or not out.exists():
            print(f"{name}: exit code {process.returncode}\n{said.decode()[-3000:]}")
            return False
        shutil.copy(out, HERE / "spans" / f"{name}.json")
        print(f"{name}: {out.stat().st_size} bytes")
        return True


def _command(script: str, wanted: Sequence[str], place: Path) -> list[str]:
    path = str(HERE / "agents" / script)
    if script.endswith(".mjs"):  # Node finds packages beside the script
        return ["bash", "-ec", f"npm install --silent --no-audit --no-fund {' '.join(wanted)} && cp {path} . && node {script}", str(place)]
    uv = shutil.which("uv") or str(HERE.parents[1] / ".tools" / "bin" / "uv")
    with_ = [part for package in wanted for part in ("--with", package)]
    return [uv, "run", "--quiet", "--no-project", "--python", "3.11", *with_, "python", f"{path}.py"]


async def main() -> int:
    """Record what the command line names; how many failed."""
    names = sys.argv[1:] or list(RECORDINGS)
    server = ToolServer()
    await server.start()
    try:
        return sum([not await record(name, server.url) for name in names])
    finally:
        await server.stop()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

"""Which command-line agents are played, and what is expected of each: the second table of docs/frameworks.md.

Each is installed from its registry and not modified. agents/NAME/agent.sh starts it as its users do without a terminal, in a folder and a
home of its own (agents/shared/work.sh); beside it stands what is installed (package.json, or requirements.txt).
"""

from __future__ import annotations

from typing import Final

from tests.matrix.frameworks import Framework, Play

_OF_GOOGLE: Final = ("top_k", "top_p")
HARNESSES: Final = (
    Framework(
        "claude_code",
        "Claude Code",
        "@anthropic-ai/claude-code",
        (
            Play("told", "messages", streamed=True, calls=1, task="told"),
            Play("files", "messages", streamed=True, task="files"),
            Play("compaction", "messages", streamed=True, calls=5, trajectories=3, breaks=("branch", "compacted"), task="compaction"),
            Play("sub_agent", "messages", streamed=True, calls=7, trajectories=2, breaks=("sub_agent",), task="sub_agent"),
        ),
        "itself",
        "spans by `CLAUDE_CODE_ENABLE_TELEMETRY` and `CLAUDE_CODE_ENHANCED_TELEMETRY_BETA`, the header by "
        "`CLAUDE_CODE_PROPAGATE_TRACEPARENT`. `/compact` leaves out the last reply, so the call for the summary branches off.",
        program="agent.sh",
    ),
    Framework(
        "codex",
        "Codex CLI",
        "@openai/codex",
        (
            Play("told", "responses", streamed=True, calls=1, task="told"),
            Play("files", "responses", streamed=True, task="files"),
            Play(
                "compaction", "responses", streamed=True, calls=5, trajectories=5, breaks=("compacted", "template_drift"), task="compaction"
            ),
        ),
        "itself",
        "by `trace_exporter` of `[otel]` in its config.toml, hundreds of spans an attempt. The call for a summary has no tools, which "
        "are at the beginning of a prompt: `template_drift`.",
        program="agent.sh",
    ),
    Framework(
        "opencode",
        "opencode",
        "opencode-ai",
        (
            Play("told", streamed=True, calls=2, trajectories=2, breaks=("sub_agent",), joined="response id", flushes=False, task="told"),
            Play("files", streamed=True, calls=4, trajectories=2, breaks=("sub_agent",), joined="response id", flushes=False, task="files"),
            Play(
                "compaction",
                streamed=True,
                calls=7,
                trajectories=6,
                breaks=("compacted", "history_edited", "sub_agent"),
                joined="response id",
                flushes=False,
                task="compaction",
            ),
            Play(
                "sub_agent",
                streamed=True,
                calls=8,
                trajectories=3,
                breaks=("sub_agent",),
                joined="response id",
                flushes=False,
                task="sub_agent",
            ),
        ),
        "itself",
        "the title is a call of its own, as is each summary, under other instructions. With OpenTelemetry it makes hundreds of spans, and "
        "does not flush the last ones: `OTEL_BSP_SCHEDULE_DELAY=50` sends most of them.",
        program="agent.sh",
    ),
    Framework(
        "qwen_code",
        "Qwen Code",
        "@qwen-code/qwen-code",
        (
            Play("told", streamed=True, calls=1, joined="address", task="told"),
            Play("files", streamed=True, joined="address", task="files"),
            Play(
                "compaction",
                streamed=True,
                calls=5,
                trajectories=5,
                breaks=("compacted", "history_edited"),
                joined="address",
                task="compaction",
            ),
            Play("sub_agent", streamed=True, calls=7, trajectories=2, breaks=("sub_agent",), joined="address", task="sub_agent"),
        ),
        "nothing",
        "its telemetry has no ids of the attempt (it reads no `OTEL_RESOURCE_ATTRIBUTES`), so it is off; so is its memory, for "
        "which it makes calls in the background. At times it loses the output of a command that ends at once: the script's ends later.",
        program="agent.sh",
    ),
    Framework(
        "gemini_cli",
        "Gemini CLI",
        "@google/gemini-cli",
        (
            Play("told", "generateContent", streamed=True, calls=1, joined="time", untrainable=_OF_GOOGLE, task="told"),
            Play("files", "generateContent", streamed=True, joined="time", untrainable=_OF_GOOGLE, task="files"),
            Play(
                "sub_agent",
                "generateContent",
                streamed=True,
                calls=7,
                trajectories=2,
                breaks=("sub_agent",),
                joined="time",
                untrainable=_OF_GOOGLE,
                task="sub_agent",
            ),
        ),
        "itself",
        "by `telemetry` of its settings, with `traces`; it sends no `traceparent`. It sends `topP` 0.95 and `topK` 64, its sub-agent does "
        'not: `sampling_policy = "enforce"` of GRPO replaces both. It shortens its history only before a message of the user, so not '
        "within a question.",
        program="agent.sh",
    ),
    Framework(
        "pi",
        "pi",
        "@mariozechner/pi-coding-agent",
        (Play("told", streamed=True, calls=1, task="told", joined="address"), Play("files", streamed=True, task="files", joined="address")),
        "nothing",
        program="agent.sh",
    ),
    Framework(
        "mini_swe_agent",
        "mini-swe-agent",
        "mini-swe-agent",
        (Play("told", task="told", calls=1), Play("files", task="files")),
        "the hook, opentelemetry-instrumentation-httpx",
        program="agent.sh",
    ),
    Framework(
        "aider",
        "aider",
        "aider-chat",
        (
            Play("told", streamed=True, calls=1, task="told", untrainable=("greedy",)),
            Play("files", streamed=True, calls=1, task="files", untrainable=("greedy",)),
        ),
        "the hook, opentelemetry-instrumentation-openai",
        "it sends temperature 0; `use_temperature: false` in its model settings leaves it out.",
        program="agent.sh",
    ),
)
UNPLAYED: Final = {
    "goose": "it is neither on npm nor on PyPI",
    "Cursor CLI": "it is neither on npm nor on PyPI, and needs an account",
    "Amp": "it needs an account",
}
"""{harness: why it is not played}."""

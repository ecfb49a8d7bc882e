#!/bin/bash
# Claude Code: agent.sh MODE QUESTION
source "$(dirname "${BASH_SOURCE[0]}")/../shared/work.sh" "$@"
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1
export CLAUDE_CODE_DISABLE_BACKGROUND_TASKS=1 # else the agent goes on beside its sub-agent, and is told of its end at one time or another
# Its spans, and the header that names the span of a call.
export CLAUDE_CODE_ENABLE_TELEMETRY=1 CLAUDE_CODE_ENHANCED_TELEMETRY_BETA=1 CLAUDE_CODE_PROPAGATE_TRACEPARENT=1
export OTEL_TRACES_EXPORTER=otlp OTEL_METRICS_EXPORTER=none OTEL_LOGS_EXPORTER=none OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf
run=(claude --model "$OPENAI_MODEL" --allowedTools Bash Agent --print)
"${run[@]}" "$2" </dev/null
if [ "$1" = compaction ]; then
  "${run[@]}" --continue "/compact" </dev/null
  "${run[@]}" --continue "$2" </dev/null
fi

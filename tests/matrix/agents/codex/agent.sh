#!/bin/bash
# Codex CLI: agent.sh MODE QUESTION
source "$(dirname "${BASH_SOURCE[0]}")/../shared/work.sh" "$@"
limit=200000
[ "$1" != compaction ] || limit=10000
export CODEX_HOME="$work/home/.codex"
mkdir -p "$CODEX_HOME"
cat >"$CODEX_HOME/config.toml" <<END
model = "$OPENAI_MODEL"
model_provider = "attempt"
check_for_update_on_startup = false
model_auto_compact_token_limit = $limit

[analytics]
enabled = false

[otel]
environment = "test"
trace_exporter = { otlp-http = { endpoint = "$OTEL_EXPORTER_OTLP_ENDPOINT/v1/traces", protocol = "binary" } }

[model_providers.attempt]
name = "attempt"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
END
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$2" </dev/null

#!/bin/bash
# opencode: agent.sh MODE QUESTION
source "$(dirname "${BASH_SOURCE[0]}")/../shared/work.sh" "$@"
context=128000
[ "$1" != compaction ] || context=20000
cat >opencode.json <<END
{
  "\$schema": "https://opencode.ai/config.json",
  "model": "attempt/$OPENAI_MODEL", "autoupdate": false, "share": "disabled", "experimental": { "openTelemetry": true },
  "provider": {
    "attempt": {
      "npm": "@ai-sdk/openai-compatible",
      "options": { "baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY" },
      "models": { "$OPENAI_MODEL": { "limit": { "context": $context, "output": 4096 } } }
    }
  }
}
END
export OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1 OTEL_BSP_SCHEDULE_DELAY=50 # it does not flush its last spans
opencode run "$2" </dev/null

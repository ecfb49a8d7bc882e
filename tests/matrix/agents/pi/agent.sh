#!/bin/bash
# pi: agent.sh MODE QUESTION
source "$(dirname "${BASH_SOURCE[0]}")/../shared/work.sh" "$@"
mkdir -p "$HOME/.pi/agent"
cat >"$HOME/.pi/agent/models.json" <<END
{
  "providers": {
    "attempt": {
      "baseUrl": "$OPENAI_BASE_URL", "api": "openai-completions", "apiKey": "OPENAI_API_KEY",
      "models": [{ "id": "$OPENAI_MODEL", "contextWindow": 128000, "maxTokens": 4096 }]
    }
  }
}
END
export PI_OFFLINE=1 PI_TELEMETRY=0 PI_SKIP_VERSION_CHECK=1
pi --provider attempt --model "$OPENAI_MODEL" --print "$2" </dev/null

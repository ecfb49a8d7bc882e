#!/bin/bash
# Gemini CLI: agent.sh MODE QUESTION
source "$(dirname "${BASH_SOURCE[0]}")/../shared/work.sh" "$@"
mkdir -p "$HOME/.gemini"
cat >"$HOME/.gemini/settings.json" <<END
{
  "general": { "enableAutoUpdate": false, "enableAutoUpdateNotification": false }, "privacy": { "usageStatisticsEnabled": false },
  "security": { "auth": { "selectedType": "gemini-api-key" }, "folderTrust": { "enabled": false } }, "telemetry": { "enabled": true, "target": "local", "useCollector": true, "otlpEndpoint": "$OTEL_EXPORTER_OTLP_ENDPOINT", "otlpProtocol": "http", "traces": true }
}
END
gemini --model "$OPENAI_MODEL" --yolo --prompt "$2" </dev/null

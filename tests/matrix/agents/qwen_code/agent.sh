#!/bin/bash
# Qwen Code: agent.sh MODE QUESTION
source "$(dirname "${BASH_SOURCE[0]}")/../shared/work.sh" "$@"
window=128000
[ "$1" != compaction ] || window=24000
mkdir -p "$HOME/.qwen"
cat >"$HOME/.qwen/settings.json" <<END
{
  "general": { "enableAutoUpdate": false }, "privacy": { "usageStatisticsEnabled": false }, "memory": { "enableManagedAutoMemory": false },
  "model": { "generationConfig": { "contextWindowSize": $window } }
}
END
qwen --auth-type openai --model "$OPENAI_MODEL" --yolo --prompt "$2" </dev/null

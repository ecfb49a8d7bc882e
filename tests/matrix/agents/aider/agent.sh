#!/bin/bash
# aider: agent.sh MODE QUESTION
source "$(dirname "${BASH_SOURCE[0]}")/../shared/work.sh" "$@"
export LITELLM_LOCAL_MODEL_COST_MAP=True
[ "$1" = told ] || files=(*.txt)
opentelemetry-instrument aider --model "openai/$OPENAI_MODEL" --no-show-model-warnings --no-show-release-notes --analytics-disable --no-check-update \
  --yes-always --no-git --no-pretty --no-detect-urls --message "$2" "${files[@]}" </dev/null | sed "/^Tokens: /,\$d"

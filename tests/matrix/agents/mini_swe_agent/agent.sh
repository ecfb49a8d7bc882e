#!/bin/bash
# mini-swe-agent: agent.sh MODE QUESTION
source "$(dirname "${BASH_SOURCE[0]}")/../shared/work.sh" "$@"
export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
opentelemetry-instrument mini --yolo --exit-immediately --model "openai/$OPENAI_MODEL" --task "$2" --output "$work/trajectory.json" </dev/null >&2 &&
  python -c 'import json, sys; print(json.load(open(sys.argv[1]))["info"]["submission"])' "$work/trajectory.json"

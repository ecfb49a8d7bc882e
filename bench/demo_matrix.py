"""`make demo-matrix`: check that the demo is reliable, with all targets, other seeds and the control; prints a summary.

Not a benchmark of speed. Takes about half an hour on two cores; `--seeds 3` makes it shorter. Exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from typing import Any

LEARNED = 0.9
UNLEARNED = 0.45
RATIO = 1e-4
CONTROL_RISE = 0.15  # a little more than three standard errors (0.04) of a mean over 128 tasks


def run(*arguments: str) -> dict[str, Any]:
    """Run one demo in its own folder; return its JSON result, or {"error": …}."""
    with tempfile.TemporaryDirectory(prefix="agl-demo-") as folder:
        command = [sys.executable, "-m", "agl_otel", "demo", "--json", "--data-dir", f"{folder}/data", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    result = json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-500:]}
    keys = ("score_before", "score_after", "steps", "trajectories", "max_ratio_error", "seconds", "error")
    print(json.dumps({"arguments": " ".join(arguments)} | {key: result[key] for key in keys if key in result}), flush=True)
    return result


def learned(result: dict[str, Any]) -> bool:
    """Return whether the agent learned the task in this run."""
    return "error" not in result and result["score_before"] <= UNLEARNED and result["score_after"] >= LEARNED


def exact(result: dict[str, Any]) -> bool:
    """Return whether the trained data equal the sampled and stored data."""
    return (
        "error" not in result
        and result["trajectories"] == result["trajectories_in_clickhouse"]
        and result["calls_not_equal"] == 0
        and result["max_ratio_error"] < RATIO
    )


def main() -> int:
    """Run the matrix; return 0 if every promise holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--control-steps", type=int, default=40)
    options = parser.parse_args()
    targets = [run("--target", str(target)) for target in range(4)]
    seeds = [run("--target", str(seed % 4), "--seed", str(seed)) for seed in range(1, options.seeds + 1)]
    control = run("--shuffle-rewards", "--max-steps", str(options.control_steps))
    promises = {
        "all targets with the default seed": all(map(learned, targets)),
        "at least 9 of 10 other seeds": sum(map(learned, seeds)) >= 0.9 * len(seeds),
        "no rise with shuffled rewards": "error" not in control and control["score_after"] - control["score_before"] <= CONTROL_RISE,
        "exact in every run": all(map(exact, [*targets, *seeds, control])),
    }
    print(json.dumps({"promises": promises}))
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

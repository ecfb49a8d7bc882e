"""`make bench`: run every benchmark, one JSON object a line. `ARGS="ingest"` runs one of them; each has its own options.

It ends with code 1 if a figure misses its bar, after it has run all of them.
"""

from __future__ import annotations

import subprocess
import sys

BENCHES = (
    "adapters",
    "claims",
    "exactness",
    "ingest",
    "ledger",
    "proxy",
    "queue_shapes",
    "reads",
    "rollout",
    "start",
    "trainer_memory",
    "training",
    "zygote",
)


def main() -> int:
    """Run the benchmarks named on the command line, or all; return the first exit code that is not 0, else 0."""
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or list(BENCHES)
    if unknown := set(names) - set(BENCHES):
        print(f"no bench {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    options = [option for option in sys.argv[1:] if option.startswith("-")]
    codes = [subprocess.run([sys.executable, "-m", f"bench.{name}", *options], check=False).returncode for name in names]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    raise SystemExit(main())

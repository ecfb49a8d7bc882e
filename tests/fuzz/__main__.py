"""`make fuzz`: hostile bytes at every port of a real stack, so many seconds each. One JSON object a port; exit 1 where one was broken."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from agl_otel.queue.client import QueueClient
from agl_otel.settings import PORTS, free_port
from tests.fuzz.fuzzer import Findings, Fuzzer
from tests.fuzz.targets import Target, targets
from tests.system.stack_process import Command, until

NAMES = ("queue", "otlp-grpc", "otlp-http", "clickhouse", "proxy", "web", "jaeger")


@contextmanager
def stack(folder: Path) -> Generator[tuple[list[Target], dict[str, int]]]:
    """A stack of its own with every port: (its ports, {service: process})."""
    data, jaeger = folder / "data", free_port()
    free = [argument for port in PORTS for argument in (f"--{port.replace('_', '-')}", "0")]
    with Command("up", "--data-dir", str(data), *free, log=folder / "up.log", cwd=folder, env={"AGL_JAEGER_PORT": str(jaeger)}) as command:
        until(lambda: (data / "stack.json").exists() or command.process.poll() is not None, "the stack runs")
        assert command.process.poll() is None, command.output
        running = {name: entry for name, entry in json.loads((data / "stack.json").read_text()).items() if isinstance(entry, dict)}

        async def described() -> dict[str, str]:
            async with QueueClient(running["queue"]["address"]) as queue:
                found = await queue.describe()
            return {
                "queue": running["queue"]["address"],
                **{name: str(value) for name, value in found.model_dump().items() if name != "queue"},
            }

        yield targets(asyncio.run(described()), f"127.0.0.1:{jaeger}"), {name: entry["pid"] for name, entry in running.items()}


def fuzz(target: Target, pids: dict[str, int], folder: Path, seed: int, *, rounds: int = 0, seconds: float = 0.0) -> Findings:
    """Attack one port."""
    return asyncio.run(Fuzzer(target, pids, folder / "data" / "logs", seed).play(rounds=rounds, seconds=seconds))


def main() -> int:
    """Play, print, and say whether all was well."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("ports", nargs="*", metavar="PORT", help=f"of {', '.join(NAMES)}; default all")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each port")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    broken = False
    with tempfile.TemporaryDirectory(prefix="agl-fuzz-") as place, stack(Path(place)) as (all_targets, pids):
        for target in all_targets:
            if target.name in (asked.ports or NAMES):
                found = fuzz(target, pids, Path(place), asked.seed, seconds=asked.seconds)
                broken |= bool(found.problems)
                peaks = {name: f"{size >> 20} MiB" for name, size in found.peak_bytes.items()}
                print(
                    json.dumps(
                        {"port": target.name, "sent": found.sent, "answers": found.answers, "peak": peaks, "problems": found.problems}
                    ),
                    flush=True,
                )
                if found.problems and any("has ended" in problem for problem in found.problems):
                    break
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())

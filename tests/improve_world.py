"""A product, its users, and `agl-otel improve` beside it, as processes; and the product's own books, by which the loop is judged.

Run as a script it is a product with users of another kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "improve"
PROMPTS = ROOT / "examples" / "improve_prompts"
MODEL = ROOT / "examples" / "apo" / "server.py"


@dataclass
class World:
    """A stack that adopts traces, and a product on it. Use `world`."""

    folder: Path
    start_stack: Callable[[], Any]
    """Returns the stack as a process that is up, on the same ports and data as before."""
    stack: Any
    store: str
    """The queue's address."""
    env: dict[str, str]
    """The stack's ports, for the product."""
    token: str = ""
    """The stack's; empty: it has none."""

    @property
    def run(self) -> Path:
        """The folder of the loop."""
        return self.folder / "run"

    @property
    def books(self) -> Path:
        """Where the product keeps its books."""
        return self.folder / "improve"

    def restart_stack(self) -> None:
        """Stop the stack, and start it again."""
        self.stack.__exit__()
        self.stack = self.start_stack()

    def improve(self, cycles: int, log: str = "improve.log", *more: str, env: dict[str, str] | None = None) -> Any:
        """Return the loop as a process, which the caller ends; `more`: further arguments."""
        from tests.system.stack_process import Command

        arguments = ["improve", "job.toml", "--store", self.store, "--run-dir", str(self.run), "--cycles", str(cycles)]
        return Command(*arguments, *more, log=self.folder / log, cwd=self.books, env={**self.authorised, **(env or {})})

    @property
    def authorised(self) -> dict[str, str]:
        """What gives a command the stack's token."""
        return {"AGL_TOKEN": self.token} if self.token else {}

    def book(self, name: str) -> list[dict[str, Any]]:
        """Read one of the product's books."""
        path = self.books / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def facts(self, cycle: int, stage: str) -> dict[str, Any]:
        """Read the file of a stage; empty if it has not ended."""
        path = self.run / "cycles" / f"{cycle:04d}" / f"{stage}.json"
        return json.loads(path.read_text()) if path.exists() else {}


@contextlib.contextmanager
def prompted(folder: Path, job: dict[str, str], *, rate: float = 10.0, token: str = "") -> Generator[World]:
    """Run the example with prompts like `world`, and the model that follows them."""
    model = subprocess.Popen([sys.executable, str(MODEL)], stdout=subprocess.PIPE, text=True)
    try:
        assert model.stdout is not None
        llm = f'{{ resource_type = "llm", endpoint = "{model.stdout.readline().strip()}", model = "words" }}'
        with world(folder, {"resources.main_llm": llm, **job}, rate=rate, example=PROMPTS, token=token) as found:
            yield found
    finally:
        model.kill()
        model.communicate()


@contextlib.contextmanager
def world(
    folder: Path, job: dict[str, str], kind: str = "", *, rate: float = 10.0, example: Path = EXAMPLE, token: str = ""
) -> Generator[World]:
    """Run a stack and an example's product, with its option `--at-random` or one of another `kind` (_serve): so many users in a second.

    With a `token` of the stack, the product has none but those that are made for it.
    `job` replaces or adds lines of its job file: {table.key: value}.
    """
    from agl_otel.settings import free_ports
    from tests.system.stack_process import ENVIRONMENT, Command, until

    place = folder / "improve"
    shutil.copytree(example, place, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    (place / "job.toml").write_text(changed((place / "job.toml").read_text(), job))
    names = ("QUEUE", "WEB", "PROXY", "OTLP_GRPC")
    ports = {f"AGL_{name}_PORT": str(port) for name, port in zip(names, free_ports(len(names)), strict=True)}
    adopting = {"AGL_UNIDENTIFIED": "adopt", "AGL_ADOPT_QUIET_SECONDS": "2"}
    settings = {
        **({"AGL_TOKEN": token} if token else {}),
        **ports,
        **{f"AGL_{name}_PORT": "0" for name in ("OTLP_HTTP", "CLICKHOUSE")},
        **adopting,
    }

    def start_stack() -> Command:
        stack = Command("up", "--data-dir", str(folder / "data"), log=folder / "up.log", cwd=place, env=settings)
        until(lambda: f":{ports['AGL_WEB_PORT']}" in stack.output, "the stack is up")
        return stack

    is_own = kind in ("", "--at-random")
    script = [str(place / "product.py"), "--rate", str(rate), *filter(None, [kind])] if is_own else [__file__, str(place), kind, str(rate)]
    with contextlib.ExitStack() as running:
        env = {**ENVIRONMENT, **ports, "PYTHONPATH": str(ROOT), **(_of_product(token) if token else {})}
        found = World(folder, start_stack, start_stack(), f"127.0.0.1:{ports['AGL_QUEUE_PORT']}", env, token)
        running.callback(lambda: found.stack.__exit__())
        product = subprocess.Popen([sys.executable, *script], cwd=place, env=env)
        running.callback(product.wait)
        running.callback(product.kill)
        yield found


def _of_product(token: str) -> dict[str, str]:
    """Return the tokens that examples/improve_prompts tells a product to have."""
    from agl_otel.net.auth import ingest_key, scoped_token

    of_calls = scoped_token(token, ["prompts", "models", "feedback"], time.time() + 3600)
    return {"PRODUCT_TOKEN": of_calls, "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {ingest_key(token)}"}


def changed(text: str, job: dict[str, str]) -> str:
    """Replace the values of keys in a job file, {`table.key`: value}; a key that it lacks is added, one with an empty value removed."""
    lines = text.splitlines()
    for name, value in job.items():
        table, _, key = name.partition(".")
        at = next(place for place, line in enumerate(lines) if line.startswith(f"[{table}]"))
        end = next((place for place in range(at + 1, len(lines)) if lines[place].startswith("[")), len(lines))
        found = next((place for place in range(at, end) if lines[place].startswith(f"{key} =")), None)
        lines[at + 1 if found is None else found : at + 1 if found is None else found + 1] = [f"{key} = {value}"] if value else []
    return "\n".join(lines) + "\n"


def rollout_of(talk: str) -> str:
    """Return the id of the rollout that a conversation becomes (docs/otlp.md)."""
    return f"ro-conversation-{hashlib.sha256(talk.encode()).hexdigest()[:32]}"


def right_share(seen: list[dict[str, Any]], since: float = 0.0, until: float = math.inf) -> float:
    """Return the share of answers in a time that were what is right, by the product's book."""
    found = [row["right"] for row in seen if row["answer"] is not None and since <= row["time"] < until]
    return sum(found) / len(found) if found else float("nan")


async def _serve(folder: Path, kind: str, rate: float) -> None:
    """Serve users whose taste is `drifting` after some seconds, who are `flattered`, or honest ones beside reviewers (`reviewed`)."""
    sys.path.insert(0, str(folder))
    import aiohttp
    from product import Product  # pyright: ignore[reportMissingImports]  # the example's

    from agl_otel.algorithms.grpo.tiny import BEHAVIOURS

    begun, (word, _, after) = time.monotonic(), kind.partition(":")

    class Drifting(Product):  # pyright: ignore[reportUntypedBaseClass]  # as above
        """Users want behaviour 1, and behaviour 2 from a time on."""

        def wanted(self, number: int) -> str:
            return str(BEHAVIOURS[1 if time.monotonic() - begun < float(after) else 2](number % 10))

    class Reviewed(Product):  # pyright: ignore[reportUntypedBaseClass]
        """Users say what is right; reviewers rate three of ten."""

        def accepted(self, number: int, reply: str) -> bool:
            return reply == self.wanted(number)

        def verdicts(self, number: int, reply: str) -> list[dict[str, Any]]:
            found = [{"source": "users", "value": float(self.accepted(number, reply))}]
            right = float(reply == self.wanted(number))
            return [*found, *([{"source": "reviewers", "value": right}] if random.random() < 0.3 else [])]

    class Flattered(Reviewed):
        """Users always accept behaviour 2, and what is right in six of ten cases."""

        def accepted(self, number: int, reply: str) -> bool:
            return reply == str(BEHAVIOURS[2](number % 10)) or (reply == self.wanted(number) and random.random() < 0.6)

    async with aiohttp.ClientSession() as session:
        await {"drifting": Drifting, "flattered": Flattered, "reviewed": Reviewed}[word](session, folder).serve(rate)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))

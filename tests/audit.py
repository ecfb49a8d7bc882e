"""`make audit`: are vulnerabilities known in what is pinned? Asks OSV (Python), npm's registry (the dashboard), vuln.go.dev (otelcol).

Exit 1 where one is known. Who cannot be asked from here (no network, no Go, a mirror that does not answer such questions) is named, with
the reason, and is no finding: with --strict it is one, for a CI that can ask.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
GOVULNCHECK: Final = "golang.org/x/vuln/cmd/govulncheck@v1.1.4"
GO_DATABASE: Final = "https://vuln.go.dev/index/db.json"
SECONDS: Final = 300
ANSWER_SECONDS: Final = 20


@dataclass(frozen=True)
class Answer:
    """What came of asking one of them."""

    found: Sequence[str] = ()
    """Known vulnerabilities, each with its package."""
    asked: int | None = None
    """How many packages it was asked about; None: it does not say."""
    reason: str = ""
    """Why it could not be asked; empty: it was."""


def python(uv: str) -> Answer:
    """uv.lock, all extras and groups, at OSV (UV_AUDIT_URL: another address that speaks its protocol)."""
    url = os.environ.get("UV_AUDIT_URL", "")
    command = [uv, "audit", "--frozen", "--output-format", "json", *(["--service-url", url] if url else [])]
    done = _run(command, ROOT)
    if done.returncode not in (0, 1):
        return Answer(reason=_last(done.stderr))
    answer: Any = json.loads(done.stdout)
    names = [
        f"{each['dependency']['name']} {each['dependency']['version']}: {each['id']} {each['summary']}"
        for each in answer["vulnerabilities"]
    ]
    return Answer(names, answer["summary"]["audited_packages"])


def dashboard() -> Answer:
    """package-lock.json of the dashboard, at npm's registry."""
    npm = shutil.which("npm")
    if npm is None:
        return Answer(reason="there is no npm here")
    done = _run([npm, "audit", "--package-lock-only", "--json"], ROOT / "agl_otel" / "web" / "dashboard")
    try:
        return npm_answer(json.loads(done.stdout))
    except ValueError:
        return Answer(reason=_last(done.stderr))


def npm_answer(answer: Any) -> Answer:
    """What `npm audit --json` says: vulnerabilities by package, or an error in their place."""
    if "vulnerabilities" not in answer:
        return Answer(reason=str(answer.get("message") or answer.get("error", {}).get("summary") or answer)[:300])
    names = [f"{name}: {each['severity']}" for name, each in answer["vulnerabilities"].items()]
    return Answer(names, answer.get("metadata", {}).get("dependencies", {}).get("total"))


def otelcol() -> Answer:
    """The processor of the OpenTelemetry Collector, what of its dependencies is called, at vuln.go.dev."""
    go = shutil.which("go")
    if go is None:
        return Answer(reason="there is no Go here")
    try:
        urllib.request.urlopen(GO_DATABASE, timeout=ANSWER_SECONDS).close()
    except OSError as error:  # asked first: building govulncheck takes a minute
        return Answer(reason=f"{GO_DATABASE}: {error}")
    done = _run([go, "run", GOVULNCHECK, "./..."], ROOT / "collector" / "otelcol")
    if done.returncode not in (0, 3):
        return Answer(reason=_last(done.stderr))
    return Answer([line for line in done.stdout.splitlines() if line.startswith("Vulnerability #")])


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {SECONDS} s")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def main() -> int:
    """Ask all, say what they said; 1 where one knows of something, or with --strict could not be asked."""
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="who cannot be asked is a failure, too")
    parser.add_argument("--uv", default="uv", help="the uv to ask with")
    parser.add_argument("--only", choices=["python", "dashboard", "otelcol"], action="append", help="of these alone (repeatable)")
    options = parser.parse_args()
    asks: dict[str, Callable[[], Answer]] = {"python": lambda: python(options.uv), "dashboard": dashboard, "otelcol": otelcol}
    failed = False
    for name, ask in asks.items():
        if options.only and name not in options.only:
            continue
        answer = ask()
        failed |= bool(answer.found) or (options.strict and bool(answer.reason))
        if answer.reason:
            print(f"{name}: NOT ASKED: {answer.reason}")
        elif answer.found:
            print("\n".join([f"{name}: {len(answer.found)} known vulnerabilities", *(f"  {each}" for each in answer.found)]))
        else:
            print(f"{name}: nothing is known{f' of {answer.asked} packages' if answer.asked is not None else ''}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

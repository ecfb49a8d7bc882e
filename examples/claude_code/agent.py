"""Claude Code on one instance, headless: it works in a fresh repository, and its changes are printed as a patch.

Where the `claude` command is not installed, stand_in.py makes the same calls with Anthropic's SDK.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from instances import INSTANCES

PROMPT = "The repository is in {folder}. Resolve this issue by editing its files:\n\n{problem}"
MODEL = "claude-sonnet-4-5"  # an alias, which the proxy maps to a model
OPTIONS = ("--print", "--model", MODEL, "--allowedTools", "Read,Edit,Write,Bash", "--permission-mode", "acceptEdits", "--max-turns", "30")


def program() -> list[str]:
    found = shutil.which("claude")
    return [found, *OPTIONS] if found else [sys.executable, str(pathlib.Path(__file__).parent / "stand_in.py"), MODEL]


def solve(name: str) -> str:
    instance = INSTANCES[name]
    with tempfile.TemporaryDirectory(prefix="instance-") as place:
        folder = pathlib.Path(place).resolve() / "repository"
        write(folder, instance["files"])
        git(folder, "init", "--quiet")
        git(folder, "add", "--all")
        own = {"CLAUDE_CONFIG_DIR": f"{place}/config", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
        prompt = PROMPT.format(folder=folder, problem=instance["problem"])
        subprocess.run([*program(), prompt], cwd=folder, env={**os.environ, **own}, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=True)
        return git(folder, "diff")


def write(folder: pathlib.Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def git(folder: pathlib.Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print(solve(sys.argv[1]), end="")

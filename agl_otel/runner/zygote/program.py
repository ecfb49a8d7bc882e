"""Decide which commands a warm parent can fork, and which imports of a script it may preload. Pure, except for reading the script.

    python agent.py args      python -m package.module args      python -c code args      (each with -u)

Preloaded are imports of installed packages at the top of the script, before any statement that could change their effect
(os.environ["HF_HOME"] = …); every run imports the user's modules itself. Installed modules that the first runs import later are
preloaded for the next ones: all of them, or for a program that accesses its environment those of the packages imported at its top.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Program:
    """A parsed Python command line."""

    kind: Literal["script", "module", "code"]
    target: str
    """The script's path, the module's name, or the code."""
    arguments: tuple[str, ...]
    unbuffered: bool = False

    @property
    def command(self) -> list[str]:
        """The command line without the interpreter."""
        option = {"script": [], "module": ["-m"], "code": ["-c"]}[self.kind]
        return [*(["-u"] if self.unbuffered else []), *option, self.target, *self.arguments]

    def to_json(self) -> dict[str, Any]:
        """Serialise for the warm parent."""
        return {"kind": self.kind, "target": self.target, "arguments": list(self.arguments), "unbuffered": self.unbuffered}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Program:
        """Parse the result of `to_json`."""
        return cls(data["kind"], data["target"], tuple(data["arguments"]), data["unbuffered"])


def parse(arguments: Sequence[str]) -> Program | str:
    """Parse the arguments of an interpreter; return the program, or as text the reason why a fork cannot run it."""
    rest = list(arguments)
    unbuffered = False
    while rest and rest[0] == "-u":
        unbuffered = True
        del rest[0]
    if not rest:
        return "it names no program"
    first = rest[0]
    if first in ("-m", "-c"):
        if len(rest) < 2:
            return f"nothing follows {first}"
        return Program("module" if first == "-m" else "code", rest[1], tuple(rest[2:]), unbuffered)
    if first.startswith("-"):
        return f"the interpreter's option {first} needs a new process"
    return Program("script", first, tuple(rest[1:]), unbuffered)


def imports_at_the_top(source: str) -> list[str]:
    """List the modules that a program imports before it does anything else, in order; empty where it does not parse."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []
    names: list[str] = []
    for statement in body:
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            if statement.level == 0 and statement.module:
                names.append(statement.module)
        elif not _harmless(statement):
            break
    return list(dict.fromkeys(name for name in names if name != "__future__"))


def touches_environment(source: str) -> bool:
    """Return whether a program may change environment variables, which libraries may read at import; True for an empty source."""
    return not source or "environ" in source or "putenv" in source


def _harmless(statement: ast.stmt) -> bool:
    """Return whether a statement cannot affect a later import: a docstring, a definition, a constant."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
            return True
        case ast.Assign(targets=targets, value=ast.Constant()):
            return all(isinstance(target, ast.Name) for target in targets)
        case _:
            return False


def source_of(program: Program, cwd: Path) -> str:
    """Read the program's source; empty where it cannot be read."""
    if program.kind == "code":
        return program.target
    path = cwd / program.target if program.kind == "script" else cwd / (program.target.replace(".", "/") + ".py")
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""

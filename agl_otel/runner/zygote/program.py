"""Which commands a warm parent can run, and which imports of a script it may load ahead. Pure but for reading the script.

    python agent.py args      python -m package.module args      python -c code args      (each with -u)

Loaded ahead is only what any run would load first: imports at the top of the script, before any statement that could change what
they do (os.environ["HF_HOME"] = …), of installed packages; the user's own modules are loaded by each run anew. What else a run has
loaded is loaded ahead for the next ones, too; of a program that touches its environment only what belongs to those packages.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Program:
    """A Python command line, taken apart."""

    kind: Literal["script", "module", "code"]
    target: str
    """The script's path, the module's name, or the code."""
    arguments: tuple[str, ...]
    unbuffered: bool = False

    @property
    def command(self) -> list[str]:
        """What follows the interpreter on its command line."""
        option = {"script": [], "module": ["-m"], "code": ["-c"]}[self.kind]
        return [*(["-u"] if self.unbuffered else []), *option, self.target, *self.arguments]

    def to_json(self) -> dict[str, Any]:
        """As the warm parent gets it."""
        return {"kind": self.kind, "target": self.target, "arguments": list(self.arguments), "unbuffered": self.unbuffered}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Program:
        """What `to_json` gave."""
        return cls(data["kind"], data["target"], tuple(data["arguments"]), data["unbuffered"])


def parse(arguments: Sequence[str]) -> Program | str:
    """The program in what follows the interpreter on a command line; where a fork cannot run it, why, in words."""
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
        return f"the interpreter's option {first} is for a process of its own"
    return Program("script", first, tuple(rest[1:]), unbuffered)


def imports_at_the_top(source: str) -> list[str]:
    """The modules that a program imports before it does anything else, in order; empty where it does not parse."""
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
    """Whether a program may change variables that libraries look at when they are imported. True where it cannot be read."""
    return not source or "environ" in source or "putenv" in source


def _harmless(statement: ast.stmt) -> bool:
    """Whether a statement between imports cannot change what the next import does: a docstring, a definition, a constant."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
            return True
        case ast.Assign(targets=targets, value=ast.Constant()):
            return all(isinstance(target, ast.Name) for target in targets)
        case _:
            return False


def source_of(program: Program, cwd: Path) -> str:
    """The program's source where it can be read here; else empty."""
    if program.kind == "code":
        return program.target
    path = cwd / program.target if program.kind == "script" else cwd / (program.target.replace(".", "/") + ".py")
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""

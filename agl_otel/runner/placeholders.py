"""`{question}` in a command's arguments: which names a task offers, and putting them in. Pure.

Only `{name}` is a placeholder, so that JSON, awk and `${VAR}` in a command stay what they are; `{{name}}` is a literal `{name}`.
Values are put into arguments, never into a shell: `sh -c 'agent "$1"' _ {question}` is the safe way to have both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agl_otel.errors import UsageError

_PLACEHOLDER: Final = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_]*)\}\}|(?<!\$)\{([A-Za-z_][A-Za-z0-9_]*)\}")
WHOLE_TASK: Final = ("task", "input")
"""Names that stand for the whole task where it is no dict with such a key."""


def names_in(command: Sequence[str]) -> list[str]:
    """The placeholders of a command, in order, each once."""
    return list(dict.fromkeys(match[2] for argument in command for match in _PLACEHOLDER.finditer(argument) if match[2]))


def values_of(task: Any) -> dict[str, Any]:
    """What a task offers: the keys of a dict, and the whole task by the names of WHOLE_TASK."""
    values: dict[str, Any] = dict.fromkeys(WHOLE_TASK, task)
    if isinstance(task, Mapping):
        values |= {str(key): value for key, value in task.items()}
    return values


def check(command: Sequence[str], task: Any) -> None:
    """Raise UsageError that names the placeholders which `task` cannot fill."""
    values = values_of(task)
    if missing := [name for name in names_in(command) if name not in values]:
        offered = ", ".join(f"{{{name}}}" for name in values)
        wanted = ", ".join(f"{{{name}}}" for name in missing)
        raise UsageError(f"the command asks for {wanted}, which the task does not have; it offers {offered}")


def fill(command: Sequence[str], task: Any) -> list[str]:
    """The command with the task's values put in: text as it is, anything else as JSON. Raises UsageError like `check`."""
    check(command, task)
    values = {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for name, value in values_of(task).items()}
    return [_PLACEHOLDER.sub(lambda match: f"{{{match[1]}}}" if match[1] else values[match[2]], argument) for argument in command]

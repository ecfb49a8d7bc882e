"""Replace placeholders such as `{question}` in a command's arguments by values of the task. Pure.

Only `{name}` is a placeholder: JSON, awk programs and `${VAR}` are left alone, and `{{name}}` is a literal `{name}`.
No shell sees the values; to use one safely, pass them as its arguments: `sh -c 'agent "$1"' _ {question}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agl_otel.errors import UsageError

_PLACEHOLDER: Final = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_]*)\}\}|(?<!\$)\{([A-Za-z_][A-Za-z0-9_]*)\}")
WHOLE_TASK: Final = ("task", "input")
"""Names for the whole task, unless it is a dict with such a key."""


def names_in(command: Sequence[str]) -> list[str]:
    """List the placeholders of a command, in order, each once."""
    return list(dict.fromkeys(match[2] for argument in command for match in _PLACEHOLDER.finditer(argument) if match[2]))


def values_of(task: Any) -> dict[str, Any]:
    """Return the values that placeholders can name: the items of a dict task, and the whole task under the names of WHOLE_TASK."""
    values: dict[str, Any] = dict.fromkeys(WHOLE_TASK, task)
    if isinstance(task, Mapping):
        values |= {str(key): value for key, value in task.items()}
    return values


def check(command: Sequence[str], task: Any) -> None:
    """Raise UsageError, naming the placeholders, where `task` cannot fill all of them."""
    values = values_of(task)
    if missing := [name for name in names_in(command) if name not in values]:
        offered = ", ".join(f"{{{name}}}" for name in values)
        wanted = ", ".join(f"{{{name}}}" for name in missing)
        raise UsageError(f"the command asks for {wanted}, which the task does not have; it offers {offered}")


def fill(command: Sequence[str], task: Any) -> list[str]:
    """Fill in the task's values: text as it is, other values as JSON. Raises UsageError like `check`."""
    check(command, task)
    values = {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for name, value in values_of(task).items()}
    return [_PLACEHOLDER.sub(lambda match: f"{{{match[1]}}}" if match[1] else values[match[2]], argument) for argument in command]

"""0.3's `config`: command-line options from the parameters of classes.

trainer, agent = lightning_cli(Trainer, MyAgent)     # --trainer.n-runners 4 --my-agent.prompt "…"
"""

from __future__ import annotations

import argparse
import inspect
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

__all__ = ["lightning_cli"]
_NONE: Final = ("none", "nil", "null", "")
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


def lightning_cli(*classes: type[Any], arguments: Sequence[str] | None = None) -> Any:
    """Instantiate these classes with arguments from the command line; return one object, or a tuple of several.

    Every parameter is `--class-name.parameter-name`; "None" and "nil" are None; lists take several values; parameters without a
    default are required. `arguments` None: sys.argv. Exits with a message if the arguments are invalid.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for cls in classes:
        group = parser.add_argument_group(cls.__name__)
        for name, parameter, hint in _parameters(cls):
            required = parameter.default is inspect.Parameter.empty
            group.add_argument(
                f"--{_kebab(cls.__name__)}.{_kebab(name)}",
                dest=f"{cls.__name__}.{name}",
                required=required,
                default=argparse.SUPPRESS,
                help="required" if required else f"default: {parameter.default}",
                metavar=name.upper(),
                **_kind(hint),
            )
    given = vars(parser.parse_args(arguments))
    made = [cls(**{key.partition(".")[2]: value for key, value in given.items() if key.startswith(f"{cls.__name__}.")}) for cls in classes]
    return made[0] if len(made) == 1 else tuple(made)


def _parameters(cls: type[Any]) -> list[tuple[str, inspect.Parameter, Any]]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        hints = get_type_hints(cls.__init__)
    except NameError:  # imported under TYPE_CHECKING only
        hints = {}
    found = inspect.signature(cls).parameters.items()
    return [(name, parameter, hints.get(name, str)) for name, parameter in found if parameter.kind not in variadic]


def _kind(hint: Any) -> dict[str, Any]:
    """Return argparse's options for values of this type."""
    inner, optional = _without_none(hint)
    if get_origin(inner) in (list, tuple, Sequence) or inner in (list, tuple):
        item = next((arg for arg in get_args(inner) if arg is not Ellipsis), str)
        return {"type": _reader(item, True), "nargs": "*"}
    return {"type": _reader(inner, optional)}


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        rest = [arg for arg in get_args(hint) if arg is not type(None)]
        return (rest[0] if len(rest) == 1 else str), len(rest) < len(get_args(hint))
    return hint, False


def _reader(hint: Any, optional: bool) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text.strip().lower() in _NONE[:3] and (optional or hint not in (str, int, float, bool)):
            return None
        if hint is bool:
            if text.lower() not in (*_TRUE, *_FALSE):
                raise argparse.ArgumentTypeError(f"{text!r} is neither {', '.join(_TRUE)} nor {', '.join(_FALSE)}")
            return text.lower() in _TRUE
        return hint(text) if hint in (int, float) else text

    read.__name__ = getattr(hint, "__name__", str(hint))
    return read


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).replace("_", "-").lower()

"""[algorithm] of a job file: a model made from the keyword arguments of the class that it names, and the type of what it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

Need = Callable[[], object]
"""Something that a job needs; raises UsageError where it is not there, and starts nothing."""


def without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Options but for these."""
    return {name: value for name, value in options.items() if name not in names}


def options_of(name: str, *kinds: type, hidden: Collection[str] = ()) -> type[BaseModel]:
    """The options of the algorithm `name`: its name, and the arguments of the classes' `__init__` but for the `hidden` ones."""
    options: dict[str, Any] = {"name": (Literal[name], name)}
    for kind in kinds:
        hints = get_type_hints(kind.__init__)
        for parameter in list(inspect.signature(kind.__init__).parameters.values())[1:]:
            if parameter.name not in hidden:
                required = parameter.default is inspect.Parameter.empty
                options[parameter.name] = (hints[parameter.name], ... if required else parameter.default)
    return create_model("AlgorithmOptions", __config__=ConfigDict(extra="forbid"), **options)

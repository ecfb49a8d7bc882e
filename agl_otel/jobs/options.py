"""[algorithm] of a job file: its model, made from the keyword arguments of the algorithm's class, and the type of a job's checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

Need = Callable[[], object]
"""A check of something that a job needs; raises UsageError if it is missing, and starts nothing."""


def without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the options without these."""
    return {name: value for name, value in options.items() if name not in names}


def options_of(name: str, *kinds: type, hidden: Collection[str] = ()) -> type[BaseModel]:
    """Make the model of options of the algorithm `name`: its name, and the arguments of the classes' `__init__` except `hidden` ones."""
    options: dict[str, Any] = {"name": (Literal[name], name)}
    for kind in kinds:
        hints = get_type_hints(kind.__init__)
        for parameter in list(inspect.signature(kind.__init__).parameters.values())[1:]:
            if parameter.name not in hidden:
                required = parameter.default is inspect.Parameter.empty
                options[parameter.name] = (hints[parameter.name], ... if required else parameter.default)
    return create_model("AlgorithmOptions", __config__=ConfigDict(extra="forbid"), **options)

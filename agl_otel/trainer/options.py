"""[algorithm] of a job file as a model, made from the keyword arguments of the class that it names."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model


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

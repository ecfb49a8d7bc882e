"""Build a Trainer's components from an instance, class, factory, name or dict."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, TypeVar, cast

from agl_otel.errors import UsageError

T = TypeVar("T")
OLD_PACKAGE: Final = "agentlightning"
PACKAGE: Final = "agl_otel"


def build_component(
    spec: Any,
    *,
    expected_type: type[T],
    spec_name: str,
    default_factory: Callable[[], T] | None = None,
    allow_none: bool = False,
    optional_defaults: Mapping[str, Callable[[], Any]] | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: type[T] | None = None,
    type_error_fmt: str | None = None,
    invalid_spec_error_fmt: str | None = None,
    registry: Mapping[str, Any] | None = None,
) -> T | None:
    """Build the component that `spec` describes.

    Args:
        spec: an instance; a class or factory; an import path (of Agent Lightning 0.3 too) or a name of `registry`; a dict with `type`
            (any of these) and constructor arguments; None for the default.
        expected_type: type of the result.
        spec_name: name of the component in errors.
        default_factory: makes the default.
        allow_none: whether None is allowed without a default.
        optional_defaults: {parameter: factory of its value}, for parameters that a class has and the spec does not set.
        dict_requires_type: wording of the error for a dict without `type`.
        dict_default_cls: class for a dict without `type`.
        type_error_fmt: template of the error for a component of another type, with {type_name} and {expected_type}.
        invalid_spec_error_fmt: template of the error for a spec that is none of these, with {actual_type} and {expected_type}.
        registry: {short name: what it stands for}, an import path or any other spec but a dict.

    Raises UsageError (a ValueError) that names the component and the error, TypeError for a component of another type.
    """
    if spec is None:
        if default_factory is None and not allow_none:
            raise UsageError(f"{spec_name} is missing")
        return default_factory() if default_factory is not None else None
    if isinstance(spec, expected_type):
        return spec
    arguments = dict(cast("Mapping[str, Any]", spec)) if isinstance(spec, Mapping) else {}
    if isinstance(spec, Mapping) and (spec := arguments.pop("type", dict_default_cls)) is None:
        hint = "a dict needs a key `type`" if dict_requires_type else "a dict without `type` needs a default class"
        raise UsageError(f"{spec_name}: {hint}, for example {{'type': 'package.module.Name', …}}")
    if isinstance(spec, str):
        spec = (registry or {}).get(spec, spec)
    if isinstance(spec, str):
        spec = load_named(spec, spec_name)
    if isinstance(spec, expected_type):
        if arguments:
            raise UsageError(f"{spec_name}: {spec!r} is an object already and takes no arguments {', '.join(arguments)}")
        return spec
    if not callable(spec):
        told = f"{spec_name} is {spec!r}: give a {expected_type.__name__}, a class or factory of one, its import path, or a dict"
        raise UsageError(_as_asked(invalid_spec_error_fmt, told, actual_type=type(spec), expected_type=expected_type.__name__))
    made = spec(**_complete(spec, arguments, optional_defaults or {}, spec_name))
    if not isinstance(made, expected_type):
        told = f"{spec_name} is a {type(made).__name__}, not a {expected_type.__name__}"
        raise TypeError(_as_asked(type_error_fmt, told, type_name=type(made), expected_type=expected_type.__name__))
    return made


def _as_asked(template: str | None, text: str, **fields: object) -> str:
    """Return the caller's template with its fields filled in; without one the text."""
    return text if template is None else template.format(**fields)


def load_named(path: str, spec_name: str = "the component") -> Any:
    """Import the object named by `package.module.Name` or `package.module:Name`. Raises UsageError.

    A path into 0.3's package is resolved to the same name in this package.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    if not module or not all(part.isidentifier() for part in (*module.split("."), name)):
        raise UsageError(f"{spec_name} {path!r} is neither a known name nor an import path: write package.module.Name")
    ours = module == OLD_PACKAGE or module.startswith(f"{OLD_PACKAGE}.")
    module = PACKAGE + module.removeprefix(OLD_PACKAGE) if ours else module
    for place in (module, PACKAGE) if ours else (module,):
        try:
            found = import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # a missing dependency of the user's module
            continue
        if (value := getattr(found, name, None)) is not None:
            return value
    raise UsageError(f"{spec_name} {path!r} cannot be found: is the package installed, and the name right?")


def _complete(make: Callable[..., Any], given: dict[str, Any], defaults: Mapping[str, Callable[[], Any]], spec_name: str) -> dict[str, Any]:
    """Return all arguments of the call. Raises UsageError where `make` does not take them."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # a builtin without a signature
        return given
    arguments = {**{name: give() for name, give in defaults.items() if name in signature.parameters and name not in given}, **given}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        called = getattr(make, "__qualname__", repr(make))
        raise UsageError(f"{spec_name}: {called}{signature} cannot be called with {sorted(map(str, given))}: {error}") from None
    return arguments

"""0.3's environment variables of strategies and helpers; all others are in Settings. Arguments override variables, variables defaults."""

from __future__ import annotations

import os
from enum import Enum
from typing import Final, overload

from agl_otel.errors import SettingsError

_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


class LightningEnvVar(Enum):
    """The variables that this module resolves."""

    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    """Whether emitters list the active span processors in the debug log."""
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    """Whether strategies serve the store (default yes)."""
    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    """Role of this process of a Trainer: algorithm, runner or both (default)."""
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    """Host on which the algorithm's machine serves the store to runners (default localhost)."""
    AGL_SERVER_PORT = "AGL_SERVER_PORT"
    """Port of the served store (default 4747)."""


@overload
def resolve_bool_env_var(env_var: LightningEnvVar, override: bool, fallback: bool | None = None) -> bool: ...
@overload
def resolve_bool_env_var(env_var: LightningEnvVar, override: bool | None = None, *, fallback: bool) -> bool: ...
@overload
def resolve_bool_env_var(env_var: LightningEnvVar, override: bool | None = None, fallback: bool | None = None) -> bool | None: ...
def resolve_bool_env_var(env_var: LightningEnvVar, override: bool | None = None, fallback: bool | None = None) -> bool | None:
    """Return `override`, else the variable (1, true, yes, on; 0, false, no, off), else `fallback`. Raises SettingsError (a ValueError)."""
    if override is not None:
        return override
    value = os.environ.get(env_var.value)
    if value is None:
        return fallback
    text = value.strip().lower()
    if text not in (*_TRUE, *_FALSE):
        raise SettingsError(f"{env_var.value} is {value!r}: use {', '.join(_TRUE)} or {', '.join(_FALSE)}")
    return text in _TRUE


@overload
def resolve_int_env_var(env_var: LightningEnvVar, override: int | None = None, *, fallback: int) -> int: ...
@overload
def resolve_int_env_var(env_var: LightningEnvVar, override: int | None = None, fallback: int | None = None) -> int | None: ...
def resolve_int_env_var(env_var: LightningEnvVar, override: int | None = None, fallback: int | None = None) -> int | None:
    """Return `override`, else the variable, else `fallback`. Raises SettingsError (a ValueError) if it is not a whole number."""
    if override is not None:
        return override
    value = os.environ.get(env_var.value)
    if value is None:
        return fallback
    try:
        return int(value)
    except ValueError:
        raise SettingsError(f"{env_var.value} is {value!r}: use a whole number") from None


@overload
def resolve_str_env_var(env_var: LightningEnvVar, override: str | None = None, *, fallback: str) -> str: ...
@overload
def resolve_str_env_var(env_var: LightningEnvVar, override: str | None = None, fallback: str | None = None) -> str | None: ...
def resolve_str_env_var(env_var: LightningEnvVar, override: str | None = None, fallback: str | None = None) -> str | None:
    """Return `override`, else the variable, else `fallback`."""
    return override if override is not None else os.environ.get(env_var.value, fallback)


__all__ = ["LightningEnvVar", "resolve_bool_env_var", "resolve_int_env_var", "resolve_str_env_var"]

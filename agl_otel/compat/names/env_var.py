"""0.3's `env_var`: agl_otel.compat.env_var."""

from __future__ import annotations

from agl_otel.compat.env_var import LightningEnvVar, resolve_bool_env_var, resolve_int_env_var, resolve_str_env_var

__all__ = ["LightningEnvVar", "resolve_bool_env_var", "resolve_int_env_var", "resolve_str_env_var"]

"""The proxy's own model list: for calls of no rollout, and for resources that name the proxy as their endpoint. Pure.

Its form is Agent Lightning 0.3's (litellm's): [{"model_name": name or pattern, "litellm_params": {"model", "api_base", "api_key", …}}].
Entries of one name are one pool. `hosted_vllm/…` and `openai/…` are called directly, every other provider through litellm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, cast

from agl_otel.errors import SettingsError, UsageError
from agl_otel.proxy.reply import Json, dicts
from agl_otel.proxy.upstream import Upstream

DIRECT: Final[Mapping[str, str]] = {"hosted_vllm": "", "openai": "https://api.openai.com/v1", "vllm": "", "sglang": ""}
"""{provider with OpenAI's protocol: its default base URL}."""
_ENVIRONMENT: Final = "os.environ/"
_NO_SAMPLING: Final = frozenset(
    {
        *("model", "api_base", "base_url", "api_key", "api_version", "organization", "custom_llm_provider", "drop_params"),
        *("timeout", "stream_timeout", "max_retries", "num_retries", "max_parallel_requests", "rpm", "tpm", "weight", "order", "tags"),
        *("input_cost_per_token", "output_cost_per_token", "use_in_pass_through"),
    }
)
"""Fields of litellm_params for connection, quotas and prices."""


class ModelList:
    """Models by requested name. An exact name wins; names with * are patterns, of which the first match wins."""

    def __init__(self, entries: Sequence[Mapping[str, Any]] = ()) -> None:
        self._by_name: dict[str, list[Upstream]] = {}
        self.replace(entries)

    def replace(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Replace all entries. Raises UsageError for an invalid entry and keeps the old ones then."""
        held: dict[str, list[Upstream]] = {}
        for entry in entries:
            name, upstream = parse_entry(entry)
            held.setdefault(name, []).append(upstream)
        self._by_name = held

    def find(self, asked: str | None) -> Sequence[Upstream]:
        """Return the pool for a model name, empty without a match; without a name, the only pool if there is just one."""
        if asked is None or not asked:
            return next(iter(self._by_name.values())) if len(self._by_name) == 1 else ()
        exact = self._by_name.get(asked)
        if exact is not None:
            return exact
        return next((pool for name, pool in self._by_name.items() if "*" in name and fnmatchcase(asked, name)), ())

    def names(self) -> list[str]:
        """All names, in the order of the list."""
        return list(self._by_name)


def parse_entry(entry: Mapping[str, Any]) -> tuple[str, Upstream]:
    """Return name and endpoint of one entry. Raises UsageError."""
    name, params = entry.get("model_name"), entry.get("litellm_params")
    model = cast("Json", params).get("model") if isinstance(params, Mapping) else None
    if not isinstance(name, str) or not isinstance(model, str) or not name or not model:
        raise UsageError(f'an entry of a model list is {{"model_name": …, "litellm_params": {{"model": …}}}}, not {str(entry)[:200]}')
    held = cast("Json", params)
    base = held.get("api_base") or held.get("base_url") or ""
    key = _secret(held.get("api_key"), name)
    sampling = sampling_in(held)
    provider, slash, rest = model.partition("/")
    if (slash and provider in DIRECT) or (not slash and base):
        url = str(base or DIRECT[provider]).rstrip("/")
        if not url:
            raise UsageError(f"model {name}: {model} needs an api_base, the base URL of the server")
        return name, Upstream(url, (rest if slash else model), key, sampling)
    return name, Upstream(str(base).rstrip("/"), model, key, sampling, provider="litellm")


def sampling_in(params: Mapping[str, Any]) -> Json:
    """The sampling parameters among litellm_params."""
    return {name: value for name, value in params.items() if name not in _NO_SAMPLING}


def load(path: str) -> list[Json]:
    """Read the entries of a JSON file (a list, or an object with `model_list`); none for an empty path. Raises SettingsError."""
    if not path:
        return []
    try:
        content: Any = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(f"AGL_MODELS names {path}, which is no readable JSON file: {error}") from None
    return dicts(cast("Json", content).get("model_list") if isinstance(content, dict) else content)


def _secret(value: Any, name: str) -> str | None:
    if not isinstance(value, str) or not value.startswith(_ENVIRONMENT):
        return value if isinstance(value, str) else None
    variable = value.removeprefix(_ENVIRONMENT)
    if variable not in os.environ:
        raise UsageError(f"the api_key of model {name} is {value}, and there is no variable {variable}")
    return os.environ[variable]

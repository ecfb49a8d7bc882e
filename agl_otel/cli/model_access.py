"""Options of commands that ask a model behind an endpoint themselves, without the proxy."""

from __future__ import annotations

import os
from typing import Any, Final
from urllib.parse import urlsplit

import click

from agl_otel.cli.common import Decorator
from agl_otel.errors import UsageError
from agl_otel.store import Store
from agl_otel.text import without_secrets

KEY_FROM: Final = "OPENAI_API_KEY"
key_env_option: Decorator = click.option(
    "--key-env", default=KEY_FROM, show_default=True, metavar="NAME", help="The environment variable with the key."
)


def checked_endpoint(option: str, endpoint: str) -> str:
    """Return the address that `option` gave. Raises UsageError if it is none, or holds a password."""
    try:
        parts = urlsplit(endpoint)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{option} {without_secrets(endpoint)!r} is no http:// or https:// address")
    if parts.password or parts.username:
        raise UsageError(f"{option} holds a password, which other users can see in `ps`: set the key in the environment (--key-env)")
    return endpoint


def key_of(key_env: str) -> str:
    """Return the key; empty if the default variable has none. Raises UsageError if another one is not set."""
    key = os.environ.get(key_env, "")
    if not key and key_env != KEY_FROM:
        raise UsageError(f"--key-env {key_env}: this environment variable is not set")
    return key


def check_not_proxy(store: Store, option: str, endpoint: str, whose: str) -> None:
    """Raise UsageError if the address is that of the store's own stack."""
    found: Any = store.description
    own = {urlsplit(each).netloc for each in (found.proxy, found.web, *found.proxies) if each}
    if urlsplit(endpoint).netloc in own:
        raise UsageError(
            f"{option} {endpoint} is the stack's own proxy, which would record {whose} calls as those of an agent: "
            "give the model server's address"
        )

"""Makes untrusted text safe to show: printable in a terminal, a log or JSON, and without secrets. Pure.

Agents, models and clients may send escape sequences that move the cursor, rename the window or reverse the text: they are shown as \\x1b
or \\u202e and never reach the terminal. `without_secrets` is for copies only (run.json, messages): a mark replaces each secret, so copies
that differ only in secrets are equal, and a key may change between two starts of a run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

# --- printable -------------------------------------------------------------------------------------------------------

_HIDDEN: Final = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Besides characters below a space, which JSON escapes itself."""


def printable(text: str) -> str:
    """Replace characters that do not print, line ends included, by escapes such as \\x1b."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Escape as `printable` does, but keep line ends; further lines are indented, so that none looks like a new record."""
    return "\n    ".join(printable(line.expandtabs()) for line in text.rstrip("\n").split("\n"))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Encode `value` as printable JSON: characters that do not print are escaped."""
    text = strict_json(value, ensure_ascii=False, default=str, indent=indent)
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def strict_json(value: Any, **options: Any) -> str:
    """Encode `value` as JSON; NaN and infinity, which JSON lacks, become null. `options`: of json.dumps."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast(dict[Any, Any], value).items()}
    return [_finite(item) for item in cast(Sequence[Any], value)] if isinstance(value, (list, tuple)) else value


# --- without secrets -------------------------------------------------------------------------------------------------

MAX_ERROR: Final = 500
LEFT_OUT: Final = "(secret-left-out)"
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS: Final = frozenset(
    {"apikey", "password", "passwd", "passphrase", "secret", "secrets", "authorization", "credential", "credentials", "cookie"}
)
_SECRET_KEYS: Final = frozenset({"api", "access", "private", "secret", "auth", "account", "master", "signing", "encryption"})
"""Words that make a following `key` a secret."""
_PLAIN_TOKENS: Final = frozenset({"pad", "eos", "bos", "unk", "stop", "mask", "sep", "cls", "special", "image", "start", "end", "per"})
"""Words that make a following `token` a tokenizer's, not a secret."""
_PLACES: Final = frozenset({"env", "file", "path", "name", "header", "env_var"})
"""Last words of names that locate a secret without being one."""
_ENDS: Final = "|".join(f"(?<={word})" for word in ("api-key", "token", "password", "secret"))  # at a flag's end: one check each
_SHAPES: Final = (
    (re.compile(r"(?<=://)[^/\s\"']+(?=@)"), LEFT_OUT),  # user:password@host, up to the last @
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {LEFT_OUT}"),
    (re.compile(r"(?i)([?&](?:api[-_]?key|key|token|access[-_]?token|password|secret|sig|signature)=)[^&\s\"']+"), rf"\1{LEFT_OUT}"),
    (re.compile(rf"(?i)(?<![a-z-])([a-z]*+-[a-z-]*+(?:{_ENDS})=)\S+"), rf"\1{LEFT_OUT}"),  # --db-password=…
    (re.compile(r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{8,}"), LEFT_OUT),
    (re.compile(r"\b(?:hf_|gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-|nvapi-|gsk_|AKIA|AIza)[A-Za-z0-9_-]{12,}"), LEFT_OUT),
)
_FLAG: Final = re.compile(r"--?[A-Za-z][\w-]*$")


def is_secret(name: str) -> bool:
    """Whether the value of an option, header, flag or variable of this name is a secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or words[-1] in _PLACES:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return before not in _PLAIN_TOKENS
    return not _SECRET_WORDS.isdisjoint(words) or (words[-1] == "key" and before in _SECRET_KEYS)


def without_secrets(value: Any) -> Any:
    """Copy a value (as for JSON) with every secret replaced by LEFT_OUT."""
    if isinstance(value, Mapping):
        given = cast("Mapping[Any, Any]", value)
        return {name: LEFT_OUT if _hides(str(name), inner) else without_secrets(inner) for name, inner in given.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _listed(cast("Sequence[Any]", value))
    return _text(value) if isinstance(value, str) else value


def error_text(error: BaseException) -> str:
    """An error's name and what it says, without secrets, at most MAX_ERROR characters; its repr may hold all headers of a request."""
    said = printable(without_secrets(_said(error)))
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]} …"


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - of a class of others whose own text fails
        return ""


def _hides(name: str, value: object) -> bool:
    return is_secret(name) and isinstance(value, str) and bool(value)


def _listed(values: Sequence[Any]) -> list[Any]:
    """Copy a list. It may be a command's arguments, so a value after a flag such as `--api-key` is replaced, too."""
    kept: list[Any] = []
    flag = ""
    for value in values:
        kept.append(LEFT_OUT if flag and _hides(flag, value) and not _FLAG.match(value) else without_secrets(value))
        flag = value if isinstance(value, str) and _FLAG.match(value) else ""
    return kept


def _text(text: str) -> str:
    for shape, instead in _SHAPES:
        text = shape.sub(instead, text)
    return text

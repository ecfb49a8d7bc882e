"""One certificate instead of the world's: whatever makes a TLS context reads all that there are, and no test speaks to a machine elsewhere.

It is an eighth of the start of each process that imports aiohttp, and most of what a new client of the OpenAI SDK costs (80 ms, or 12).
What downloads something takes `downloading()`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

import certifi

_END: Final = "-----END CERTIFICATE-----\n"
_NAME: Final = "SSL_CERT_FILE"
_BEFORE: Final = "SSL_CERT_FILE_BEFORE"
"""What it was, for this process and those that it starts."""


def read_one_certificate() -> None:
    """From now on, in this process and those that it starts."""
    place = Path(tempfile.gettempdir()) / f"agl-otel-tests-{os.getuid()}-one-certificate.pem"
    if not place.exists():
        own = place.with_suffix(f".{os.getpid()}")  # test processes start at the same time
        own.write_text(Path(certifi.where()).read_text().partition(_END)[0] + _END)
        own.replace(place)
    os.environ.setdefault(_BEFORE, os.environ.get(_NAME, ""))
    os.environ[_NAME] = str(place)


def downloading() -> dict[str, str]:
    """The environment of a command that downloads: with the certificates of this machine."""
    before = os.environ.get(_BEFORE)
    if before is None:
        return dict(os.environ)
    others = {name: value for name, value in os.environ.items() if name not in (_NAME, _BEFORE)}
    return {**others, _NAME: before} if before else others

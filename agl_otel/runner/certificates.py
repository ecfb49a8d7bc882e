"""Certificate files that agents' SDKs use for TLS connections to the stack.

OTLP exporters have their own settings for an authority and a client certificate. Model SDKs take one file of authorities for all
connections, so they get a bundle of the machine's authorities and the stack's.
"""

from __future__ import annotations

import atexit
import os
import ssl
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agl_otel.net.tls import Trust


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files; empty: none."""

    authority: str = ""
    certificate: str = ""
    key: str = ""
    bundle: str = ""
    """The machine's authorities and the stack's."""


@cache
def certificates(trust: Trust) -> Certificates:
    """Return the files of `trust`; the bundle is written once and removed when this process exits."""
    paths = [str(Path(path).absolute()) if path else "" for path in (trust.authority, trust.certificate, trust.key)]
    return Certificates(*paths, bundle=_bundle(paths[0]) if trust.authority else "")


def _bundle(authority: str) -> str:
    defaults = ssl.get_default_verify_paths()
    machine = os.environ.get("SSL_CERT_FILE") or defaults.cafile or defaults.openssl_cafile
    content = [Path(path).read_bytes() for path in (machine, authority) if path and Path(path).is_file()]
    handle, path = tempfile.mkstemp(prefix="agl-otel-authorities-", suffix=".pem")
    owner = os.getpid()
    with os.fdopen(handle, "wb") as file:
        file.write(b"\n".join(content))
    atexit.register(lambda: Path(path).unlink(missing_ok=True) if os.getpid() == owner else None)
    return path

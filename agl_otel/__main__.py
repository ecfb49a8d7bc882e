"""`python -m agl_otel` is the `agl-otel` command."""

from __future__ import annotations

from agl_otel.cli import main

main()

"""`python -m agl_otel.web`: serve until SIGTERM."""

from __future__ import annotations

from agl_otel.web.app import main

if __name__ == "__main__":
    raise SystemExit(main())

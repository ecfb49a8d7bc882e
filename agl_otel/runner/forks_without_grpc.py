"""Loads gRPC so that it does nothing when this process forks, as a function agent may: import this before anything that loads it.

What it does at a fork it skips where other threads call into it, as those of a runner nearly always do. Where it does not skip that, the
child may die of a SIGSEGV before its first line. Such a child does not use it (telemetry/otlp.py). What the user has set stays, and
what is started from here inherits nothing of it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

_SETTING: Final = "GRPC_ENABLE_FORK_SUPPORT"  # read when gRPC is loaded

if "grpc" not in sys.modules and _SETTING not in os.environ:
    os.environ[_SETTING] = "0"
    try:
        importlib.import_module("grpc")
    finally:
        del os.environ[_SETTING]

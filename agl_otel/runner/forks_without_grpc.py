"""Load gRPC with its fork handlers disabled. Import this before anything else that loads gRPC.

Function agents may fork. gRPC skips its fork handlers while other threads call into it, which is nearly always the case in a runner;
when it does run them, the child may die of SIGSEGV before its first line. Forked children do not use gRPC (telemetry/otlp.py).
A value that the user has set is kept, and child processes do not inherit the variable.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

_SETTING: Final = "GRPC_ENABLE_FORK_SUPPORT"  # gRPC reads it when it is loaded

if "grpc" not in sys.modules and _SETTING not in os.environ:
    os.environ[_SETTING] = "0"
    try:
        importlib.import_module("grpc")
    finally:
        del os.environ[_SETTING]

"""The zygote: a warm Python process with instrumentation and the agent's libraries loaded, which forks once for each attempt.

It saves the seconds that a new interpreter under opentelemetry-instrument spends on imports. `parent.py` is the warm process, `child.py`
turns a fork into the agent, `client.py` is the runner's side, `program.py` (pure) decides which commands can be forked. Nothing that
belongs to an attempt exists before the fork: SDK, exporters, ids, random state and sockets are created in the child. The warm process
runs in the agent's environment, so its modules import as little of agl_otel as possible.
"""

from __future__ import annotations

"""The zygote: a warm Python process that has the instrumentation and the agent's libraries loaded, and forks once for each attempt.

A fresh interpreter under opentelemetry-instrument spends seconds on imports that are the same every time. Here they are paid once:
`parent.py` is the warm process, `child.py` what a fork does to become the agent, `client.py` the runner's side, `program.py` (pure)
which commands can be run so. Nothing that belongs to an attempt exists before the fork: SDK, exporters, ids, random state and
sockets are made in the child. The warm process runs the agent's interpreter, so little of ours may be imported there.
"""

from __future__ import annotations

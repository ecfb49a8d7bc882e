"""The runner: claims rollouts from the queue and runs an agent for each.

`runner.py` holds the loop; `command.py` and `function.py` the two kinds of agents; `ending.py` what happens when they end.
Pure parts: `environment.py` (the agent's environment), `placeholders.py`, `binding.py`.
The supervisor that starts runners, and what rollouts mean, do not belong here.
"""

from __future__ import annotations

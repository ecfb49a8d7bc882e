"""Forward model calls and record what training needs of each: token ids, log-probs, weights version.

`python -m agl_otel.proxy` serves. A call arrives at app.py (routes, keys) and passes gate.py (pauses for new weights). forward.py (budgets,
retries) sends it to the pool that upstream.py and models.py resolve, in the order of pool.py (health, sticky choice); answer.py returns the
answer. dialects/ defines for each protocol which fields are added for capture, removed again, and read; reply.py assembles the answer;
attempts.py numbers calls and finds prefixes and retries; recorder.py builds the spans. llm_proxy.py replaces the model list of a running
proxy. Nothing here decides a verdict: defects of a call are recorded with it.
"""

from __future__ import annotations

"""Forward model calls and record what training needs of each: token ids, log-probs, weights version.

`python -m agl_otel.proxy` serves. A call comes in by app.py (routes, keys), passes gate.py (pauses for new weights), is sent to the pool
that upstream.py and models.py name, in the order that pool.py (health, sticky choice) gives, by forward.py (budgets, tries); answer.py
passes the bytes on. dialects/ says for each protocol what is asked in addition, taken out again, and read; reply.py puts the answer
together; attempts.py numbers calls and finds prefixes and retries; recorder.py makes the spans. llm_proxy.py hands it a list of
models.
Nothing here judges: what is wrong with a call is recorded with it.
"""

from __future__ import annotations

"""Forward model calls and record what training needs of each: token ids, log-probs, weights version.

`python -m agl_otel.proxy` serves. A call arrives at app.py (routes, keys): a small one of an attempt ahead of aiohttp (net/front.py), any
other through it. Both ways end in `Forwarder.call`, with the client as an Agent (agent.py); what is added to calls goes there. It passes
gate.py (pauses for new weights). forward.py (budgets, retries) sends it to the pool that upstream.py and models.py resolve, in the order of
pool.py (health, sticky choice), through outgoing.py, which distrusts model servers; answer.py returns the
answer. google/ makes an agent in Google's protocol one of chat/completions. dialects/ defines for each protocol which fields are added for
capture, removed again, and read; engines.py reads what vLLM and SGLang say beside it; reply.py assembles the answer; attempts.py numbers
calls and finds prefixes and retries; recorder.py builds the spans. llm_proxy.py replaces the model list of a running proxy. Nothing here
decides a verdict: defects of a call are recorded with it.
"""

from __future__ import annotations

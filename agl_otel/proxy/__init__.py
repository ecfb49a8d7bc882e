"""The LLM gateway: an OpenAI-compatible pass-through that records what training needs of every call.

`python -m agl_otel.proxy` serves. dialects.py says what a request asks for in addition and what is taken out of the answer;
reply.py puts the answer together; attempts.py numbers calls and finds prefixes; recorder.py makes the spans; upstream.py knows the
real model server of a rollout; forward.py moves bytes; app.py has the routes. Nothing here judges or retries: the agent's own SDK does.
"""

from __future__ import annotations

"""Agent Lightning 0.3's API: Trainer, LitAgent, runners, tracers, execution strategies, LLMProxy, stores.

names/ has 0.3's module names as aliases. agl_otel adds that folder to its search path, so `agl_otel.emitter` is
`compat/names/emitter.py`; agl_otel.store does the same for `agl_otel.store.mongo`.
"""

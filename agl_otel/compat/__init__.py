"""Agent Lightning 0.3's API: Trainer, LitAgent, runners, tracers, execution strategies, LLMProxy, stores.

names/ has 0.3's module names as aliases. The package puts that folder on its search path, so `agl_otel.emitter` is
`compat/names/emitter.py`; `agl_otel.store.mongo` comes by the search path of the room `store`.
"""

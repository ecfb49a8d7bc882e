"""Module names of Agent Lightning 0.3 that are not rooms of ours: thin aliases, nothing else.

The package puts this folder on its search path, so `agl_otel.emitter` is `compat/emitter.py`, and rooms of ours put theirs on their own:
`agl_otel.tracer.weave` is `compat/tracer/weave.py`. No module of ours imports from here.
"""

"""Module names of Agent Lightning 0.3 that are not rooms of ours: thin aliases, nothing else.

The package puts this folder on its search path, so `agl_otel.emitter` is `compat/emitter.py`. No module of ours imports from here.
"""

"""GRPO on the traces of any agent: the objective, the trainer's loop, and a small model server to try it with.

Nothing is imported here, because torch takes seconds: `from agl_otel.algorithms.grpo.algorithm import GRPO`.
"""

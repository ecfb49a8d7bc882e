"""GRPO on the traces of any agent: the objective, the training loop, and a small model server for trying it out.

Nothing is imported here, because torch takes seconds to import: `from agl_otel.algorithms.grpo.algorithm import GRPO`.
"""

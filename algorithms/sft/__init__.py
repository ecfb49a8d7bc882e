"""Supervised fine-tuning as a loop: roll out, keep the best, train on them, serve the next version, repeat.

Nothing is imported here, because torch takes seconds: `from agl_otel.algorithms.sft.algorithm import SFT`.
"""

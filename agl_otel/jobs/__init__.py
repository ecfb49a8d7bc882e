"""Read, check and run job files: `agl-otel train JOB.toml`.

A job trains weights (grpo.py, sft.py, verl.py), searches for prompts (prompts.py), or runs any other algorithm (custom.py). job.py reads
the file, check.py validates it, run.py has what every run shares, audit.py compares what was trained on with what was sampled. judge.py is
the job of `agl-otel judge`, which has neither agent nor tasks, and so no file.
"""

"""Of many job files with one fault each, every one is refused with the key, the bound and a remedy, before anything is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

from agl_otel.cli import main
from agl_otel.jobs.check import check_job

MINE = """
def agent(task): return 1.0
def tasks(): return [{"question": "?"}]
def none(): return []
constant = 3
def three(a, b, c): return 1.0
def named(*, task, answer): return 1.0
def stream(task, answer=None): yield 1.0
def text(): return "abc"
def table(): return {"a": 1}
def objects(): return [object()]
def infinite(): return [1, float("inf")]
class Agent:
    def __init__(self, task): self.task = task
    def run(self): return 1.0
class Grader:
    def __init__(self, task, answer): self.score = 1.0
"""
AGENT = {"function": '"mine.py:agent"'}
DATA = {"train": '"mine.py:tasks"', "val": '"tasks.jsonl"'}
PROMPT = {"prompt": '"Answer {question}"'}
TABLES_OF_RUNS = ("agent", "data", "policy", "editor", "resources", "algorithm")
TABLES = (*TABLES_OF_RUNS, "improve")
GOOD: dict[str, dict[str, str]] = {
    "grpo": {},
    "sft": {},
    "verl": {"config.actor_rollout_ref.rollout.n": "4", "config.data.train_batch_size": "8"},
    "apo": {},
    "gepa": {},
    "random_search": {"choices": '["Say {question}"]'},
    "baseline": {},
}
"""{algorithm: [algorithm] of a good job}."""
LAST_SEED = (1 << 32) - 1
VLLM = 'server = "vllm"\nvllm = "/bin/true"\n'

FAULTS: list[tuple[str, str, str, str]] = [
    # [agent]
    ("grpo", "agent", "function =", r"give `function` or `command`"),
    ("grpo", "agent", 'function = ""', r'function = "": it must be non-empty'),
    ("grpo", "agent", 'function = "agent"', r"function: 'agent' does not name a function: write path/to/file\.py:function"),
    ("grpo", "agent", 'function = "gone.py:agent"', r"function: there is no file .*gone\.py"),
    ("grpo", "agent", 'function = "mine.py:agnet"', r"function: mine\.py has no 'agnet'; its functions are: agent, tasks, none, three"),
    ("grpo", "agent", 'function = "mine.py:constant"', r"function: mine\.py:constant is a int, not a function"),
    (
        "grpo",
        "agent",
        'function = "mine.py:Agent"',
        r"function: Agent is a class, and calling it only makes one: name a function",
    ),
    (
        "grpo",
        "agent",
        'grader = "mine.py:Grader"',
        r"grader: Grader is a class, and calling it only makes one: name a function",
    ),
    ("grpo", "agent", 'grader = "mine.py:grade"', r"grader: mine\.py has no 'grade'; its functions are"),
    ("grpo", "agent", "grader = 3", r"grader = 3: it must be a text in quotes"),
    ("grpo", "agent", "command = []", r"command = \[\]: it must be non-empty"),
    ("grpo", "agent", 'command = [""]', r'command\[0\] = "": it must be non-empty.*give the program'),
    ("grpo", "agent", 'command = "python agent.py"', r'command = "python agent\.py": it must be a list'),
    ("grpo", "agent", 'command = ["/"]', r"command: there is no program '/' that can be executed"),
    ("grpo", "agent", 'command = ["python", "a\\u0000b"]', r"command\[1\] = .*it must have no NUL.*leave it out"),
    ("grpo", "agent", 'command = ["python", 3]', r"command = 3: it must be a text in quotes"),
    ("grpo", "agent", 'command = ["python", "away.py"]', r"command: there is no file .*away\.py"),
    (
        "grpo",
        "agent",
        'command = ["python", "mine.py", "{answer}"]',
        r"command: the command asks for \{answer\}, which the task does not have",
    ),
    ("grpo", "agent", "runners = 0", r"runners = 0: it must be at least 1 and at most 1000.*leave it out for 1"),
    ("grpo", "agent", "runners = 100000", r"runners = 100000: it must be at least 1 and at most 1000"),
    ("grpo", "agent", "runners = 1.5", r"runners = 1\.5: it must be an integer, at least 1"),
    ("grpo", "agent", "concurrency = 0", r"concurrency = 0: it must be at least 1 and at most 10000.*leave it out for 32"),
    ("grpo", "agent", "concurrency = 100000", r"concurrency = 100000: it must be .*at most 10000"),
    ("grpo", "agent", "concurrency = true", r"concurrency = true: it must be an integer"),
    ("grpo", "agent", "timeout_seconds = 0", r"timeout_seconds = 0: it must be at least 0\.1.*leave it out for 120"),
    ("grpo", "agent", "timeout_seconds = -5.0", r"timeout_seconds = -5\.0: it must be at least 0\.1"),
    ("grpo", "agent", "timeout_seconds = inf", r"timeout_seconds = Infinity: it must be a finite number, at least 0\.1"),
    ("grpo", "agent", "timeout_seconds = 1e9", r"timeout_seconds = 1000000000\.0: it must be .*at most 2592000"),
    ("grpo", "agent", "unresponsive_seconds = 2", r"unresponsive_seconds = 2: it must be at least 10 .*heartbeats come every 5 s"),
    ("grpo", "agent", "runers = 2", r"unknown key runers: did you mean runners\?"),
    # [improve]
    ("grpo", "improve", "canary = 0.95", r"canary = 0\.95: it must be greater than 0 and at most 0\.9, .*leave it out for 0\.1"),
    ("grpo", "improve", "canary = [0.05, 2]", r"canary = 2: it must be greater than 0 and at most 0\.9, because"),
    ("grpo", "improve", 'canary = "all"', r'canary = "all": it must be a number'),
    ("grpo", "improve", "max_drift = 0", r"max_drift = 0: it must be greater than 0 and at most 100, because .* leave it out for 1\.0"),
    ("grpo", "improve", 'max_drift = "none"', r'max_drift = "none": it must be .*"off"'),
    ("grpo", "improve", "canary = []", r"canary = \[\]: each share must be greater than the one before.*name at least one"),
    ("grpo", "improve", "canary = [0.3, 0.3]", r"canary = \[0\.3, 0\.3\]: each share must be greater than the one before"),
    (
        "sft",
        "improve",
        f"canary = [{', '.join(f'0.{step}' for step in range(10, 21))}]",
        r"canary = .*: a canary has at most 10 steps; name fewer shares",
    ),
    # [data]
    ("grpo", "data", "train =", r"train is missing: it must be given, because it names the tasks"),
    ("grpo", "data", 'train = ""', r'train = "": it must be non-empty'),
    ("grpo", "data", 'train = "none.jsonl"', r"train = 'none\.jsonl' cannot be read: .*No such file"),
    ("grpo", "data", 'train = "mine.py:taks"', r"train: .*mine\.py has no 'taks'; its functions are"),
    ("grpo", "data", 'train = "mine.py:none"', r"train = 'mine\.py:none' holds no task"),
    ("grpo", "data", "val =", r"val is missing: grpo scores what it made on those tasks"),
    ("grpo", "data", 'val = ["a.jsonl"]', r'val = \["a\.jsonl"\]: it must be a text in quotes'),
    ("grpo", "data", "options = { size = 3 }", r"train = 'mine\.py:tasks' gives no tasks: TypeError.*'size'"),
    ("grpo", "data", "options = 3", r"options = 3: it must be a table"),
    ("grpo", "data", 'test = "mine.py:tasks"', r"unknown key test: leave it out \(docs/job-options\.md has all keys\)$"),
    # [policy]
    ("grpo", "policy", 'model = ""', r'model = "": it must be non-empty.*leave it out for "tiny"'),
    ("grpo", "policy", 'model = "nowhere"', r"model = 'nowhere': .*holds no config\.json.*name a folder that does"),
    ("grpo", "policy", "seed = -1", rf"seed = -1: it must be at least 0 and less than {LAST_SEED + 1}"),
    ("grpo", "policy", f"seed = {LAST_SEED + 1}", rf"seed = {LAST_SEED + 1}: it must be .*less than {LAST_SEED + 1}"),
    ("grpo", "policy", 'seed = "0"', r'seed = "0": it must be an integer'),
    ("grpo", "policy", 'server = "vlm"', r"server = \"vlm\": it must be 'ours' or 'vllm' \(did you mean vllm\?\)"),
    ("grpo", "policy", 'vllm = "/opt/vllm"', r'vllm = "/opt/vllm" has no effect with server = "ours": give server = "vllm"'),
    ("grpo", "policy", 'vllm_options = ["--dtype", "half"]', r'vllm_options = .* has no effect with server = "ours"'),
    ("grpo", "policy", 'server = "vllm"\nvllm = "/no/such/vllm"', r"there is no program '/no/such/vllm': pip install vllm"),
    ("grpo", "policy", 'server = "vllm"\nvllm = "/bin/true"\nvllm_options = ["dtype"]', r'vllm_options = .*the first must begin with "--"'),
    ("grpo", "policy", 'server = "vllm"\nvllm = "/bin/true"\nvllm_options = ["--port=1"]', r"vllm_options has --port, .* leave it out"),
    ("grpo", "policy", 'server = "vllm"\nvllm = "/bin/true"\nvllm_options = [1]', r"vllm_options = 1: it must be a text in quotes"),
    (
        "grpo",
        "policy",
        f'{VLLM}vllm_options = ["--enable-lora"]',
        r"vllm_options has --enable-lora, but the run sets",
    ),
    (
        "grpo",
        "policy",
        f'{VLLM}vllm_options = ["--logprobs_m=raw_logprobs"]',
        r"vllm_options has --logprobs-mode, but the run sets",
    ),
    ("grpo", "policy", f'{VLLM}vllm_options = ["--no-enable-lora"]', r"vllm_options has --no-enable-lora, but the run sets"),
    ("grpo", "policy", "devices = [99]", r"devices = \[99\]: this machine has .*there is none with the number 99; name others"),
    ("grpo", "policy", "devices = []", r"devices = \[\]: it must be non-empty, because these are GPUs, by their numbers"),
    ("grpo", "policy", 'devices = "0"', r'devices = "0": it must be a list'),
    ("grpo", "policy", "devices = [-1]", r"devices = \[-1\]: GPUs are numbered from 0"),
    ("grpo", "policy", "devices = [0, 1]", r'devices = \[0, 1\]: server = "ours" samples on one GPU; name one'),
    ("grpo", "policy", f"{VLLM}devices = [1, 1]", r"devices = \[1, 1\] names a GPU twice"),
    ("grpo", "policy", "gpu_memory_utilization = 0.5", r'gpu_memory_utilization = 0\.5 has no effect with server = "ours"'),
    ("grpo", "policy", f"{VLLM}gpu_memory_utilization = 1.5", r"gpu_memory_utilization = 1\.5: it must be at least 0\.01 and at most 1"),
    ("grpo", "policy", "sleep = true", r'sleep = true has no effect with server = "ours"'),
    ("grpo", "policy", "adapters = false", r'adapters = false has no effect with server = "ours"'),
    ("grpo", "policy", 'modle = "tiny"', r"unknown key modle: did you mean model\?"),
    # [editor], [resources]
    ("apo", "editor", 'base_url = "localhost:8000"', r"base_url = \"localhost:8000\": it must be an address such as https://"),
    ("apo", "editor", 'api_key_env = "sk-1234"', r"api_key_env = \"sk-1234\": it must be the name of an environment variable"),
    ("apo", "editor", 'api_key_env = "NO_SUCH_KEY"', r"api_key_env: the environment variable NO_SUCH_KEY is not set"),
    ("apo", "editor", "timeout_seconds = 0", r"timeout_seconds = 0: it must be at least 0\.1.*leave it out for 600"),
    ("apo", "editor", 'url = "http://127.0.0.1"', r"unknown key url: leave it out \(docs/job-options\.md has all keys\)$"),
    ("apo", "resources", "prompt =", r"has no prompt for apo to begin with: give one, name = 'text'"),
    ("apo", "resources", 'prompt = "{question"', r"prompt cannot be edited: it is no f-string template.*write it"),
    ("apo", "resources", "prompt = 3", r"prompt: .*write a text, or a table"),
    ("apo", "algorithm", 'agent_match = { p = "x" }', r"agent_match names p: the initial resources' prompts are prompt; name these"),
    ("apo", "algorithm", 'agent_match = { prompt = "(" }', r'agent_match = "\(": it is no regular expression'),
    ("apo", "algorithm", "agent_match = 3", r"agent_match = 3: it must be a text in quotes, non-empty, because an empty pattern"),
    ("apo", "resources", 'llm = { resource_type = "llm", endpoint = "http://m" }', r"llm\.llm\.model: it is missing, and must be given"),
    (
        "grpo",
        "editor",
        'base_url = "http://127.0.0.1"',
        r"has no effect with name = \"grpo\".* leave the table out \(it is for apo, gepa\)",
    ),
    ("grpo", "resources", 'prompt = "{question}"', r"has no effect with name = \"grpo\".*for apo, gepa, random_search, baseline\)"),
    ("apo", "policy", 'model = "tiny"', r"has no effect with name = \"apo\".* leave the table out \(it is for grpo, sft, verl\)"),
    # [algorithm] of GRPO: rollouts
    ("grpo", "algorithm", 'name = "gropo"', r"name = \"gropo\": it must be 'grpo', .*did you mean grpo\?"),
    ("grpo", "algorithm", "name = 3", r"name = 3: it must be 'grpo'"),
    ("grpo", "algorithm", 'name = "mine.py:nothing"', r"mine\.py has no 'nothing'; its functions are"),
    (
        "grpo",
        "algorithm",
        "learing_rate = 1e-3",
        r"unknown key learing_rate: did you mean learning_rate\? \(docs/grpo-options\.md has all keys\)$",
    ),
    ("grpo", "algorithm", 'model_dir = "m"', r"unknown key model_dir: "),
    ("grpo", "algorithm", 'credit = "mine.py:nothing"', r"mine\.py has no 'nothing'; its functions are"),
    ("grpo", "algorithm", 'credit = "togo"', r'credit = "togo": it must be one of final, to_go, states, or a function'),
    ("grpo", "algorithm", "discount = 0.9", r'discount = 0\.9 has no effect with credit = "final"'),
    ("grpo", "algorithm", "lr = 1e-3", r"unknown key lr: leave it out \(docs/grpo-options\.md has all keys\)$"),
    ("grpo", "algorithm", "prompts_per_step = 0", r"prompts_per_step = 0: it must be at least 1 .*leave it out for 16"),
    ("grpo", "algorithm", 'prompts_per_step = "16"', r'prompts_per_step = "16": it must be an integer'),
    ("grpo", "algorithm", "group_size = 1", r"group_size = 1: it must be at least 2 .*compared within a group.*leave it out for 8"),
    ("grpo", "algorithm", "group_size = 8.5", r"group_size = 8\.5: it must be an integer, at least 2"),
    ("grpo", "algorithm", "resample_rounds = -1", r"resample_rounds = -1: it must be at least 0"),
    ("grpo", "algorithm", "groups_in_flight = 16", r"groups_in_flight = 16: it must be greater than prompts_per_step \(16\)"),
    ("grpo", "algorithm", "max_staleness = -1", r"max_staleness = -1: it must be at least 0"),
    ("grpo", "algorithm", "step_timeout_seconds = 0", r"step_timeout_seconds = 0: it must be at least 1 .*leave it out for 600"),
    ("grpo", "algorithm", "step_timeout_seconds = nan", r"step_timeout_seconds = NaN: it must be a finite number"),
    ("grpo", "algorithm", 'selection = "a b"', r'selection = "a b": it must be .*it names a selection'),
    ("sft", "algorithm", 'selection = "hard@0"', r'selection = "hard@0": it must be'),
    ("sft", "algorithm", 'selection = "hard"\noffline_mode = "val"', r'offline_mode = "val" and selection = "hard" both say'),
    ("grpo", "algorithm", 'selection = "hard"\nresample_rounds = 1', r'selection = "hard" enqueues nothing: leave out'),
    ("grpo", "algorithm", 'offline_mode = "prod"', r"offline_mode = \"prod\": it must be .*'production'"),
    (
        "grpo",
        "algorithm",
        'offline_mode = "val"\nresample_rounds = 1',
        r"offline_mode = \"val\" enqueues nothing: leave out groups_in_flight",
    ),
    ("grpo", "algorithm", 'agent_match = "("', r"agent_match = \"\(\": it is no regular expression"),
    ("grpo", "algorithm", 'agent_match = ""', r"agent_match = \"\": it must be non-empty"),
    ("grpo", "algorithm", "fill_reward = nan", r"fill_reward = NaN: it must be a finite number"),
    ("grpo", "algorithm", "fill_reward = true", r"fill_reward = true: it must be a number"),
    ("grpo", "algorithm", 'shuffle_rewards = "no"', r"shuffle_rewards = \"no\": it must be true or false; .*leave it out for false"),
    # sampling
    ("grpo", "algorithm", "temperature = 0", r"temperature = 0: it must be at least 0\.01 and at most 5, because replies at 0"),
    ("grpo", "algorithm", "temperature = -0.5", r"temperature = -0\.5: it must be at least 0\.01"),
    ("grpo", "algorithm", "temperature = 100.0", r"temperature = 100\.0: it must be .*at most 5"),
    ("grpo", "algorithm", "max_tokens = 0", r"max_tokens = 0: it must be at least 1 .*leave it out for 64"),
    ("grpo", "algorithm", "max_tokens = 1024", r"max_tokens = 1024: it must be less than 1024, because the context of tiny holds"),
    ("grpo", "algorithm", "seed_sampling = 1", r"seed_sampling = 1: it must be true or false"),
    # updates
    ("grpo", "algorithm", "updates_per_step = 0", r"updates_per_step = 0: it must be at least 1 .*leave it out for 3"),
    ("grpo", "algorithm", "updates_per_step = -3", r"updates_per_step = -3: it must be at least 1"),
    ("grpo", "algorithm", "learning_rate = -1e-3", r"learning_rate = -0\.001: it must be 0, or at least 1e-12 and at most 1"),
    ("grpo", "algorithm", "learning_rate = 10", r"learning_rate = 10: it must be .*at most 1"),
    ("grpo", "algorithm", "learning_rate = inf", r"learning_rate = Infinity: it must be a finite number"),
    ("grpo", "algorithm", "max_grad_norm = -1", r"max_grad_norm = -1: it must be at least 0\.001 .*because .*leave it out for 1\.0"),
    ("grpo", "algorithm", "max_grad_norm = 0", r"max_grad_norm = 0: it must be at least 0\.001 .*0 trains nothing"),
    ("grpo", "algorithm", "minibatches = 0", r"minibatches = 0: it must be at least 1 .*leave it out for 1"),
    ("grpo", "algorithm", "micro_batch_tokens = 0", r"micro_batch_tokens = 0: it must be at least 1 .*leave it out for 16384"),
    ("grpo", "algorithm", "gradient_checkpointing = 1", r"gradient_checkpointing = 1: it must be true or false"),
    (
        "grpo",
        "algorithm",
        'dtype = "float23"',
        r"dtype = \"float23\": it must be 'auto', 'float32' or 'bfloat16' \(did you mean float32\?\)",
    ),
    ("grpo", "algorithm", 'attention = "spda"', r"attention = \"spda\": transformers refuses it \(.*leave it out"),
    ("grpo", "algorithm", 'learning_rate_schedule = "step"', r"learning_rate_schedule = \"step\": it must be 'constant'"),
    ("grpo", "algorithm", "warmup_steps = -1", r"warmup_steps = -1: it must be at least 0"),
    ("grpo", "algorithm", "lora_alpha = 0", r"lora_alpha = 0: it must be at least 0\.01 and at most 1000000"),
    ("grpo", "algorithm", "lora_targets = []", r"lora_targets = \[\]: it must be non-empty"),
    ("grpo", "algorithm", 'lora_targets = "q_proj"', r"lora_targets = \"q_proj\": it must be a list of ends .*leave it out for"),
    (
        "grpo",
        "algorithm",
        'lora_rank = 8\nlora_targets = ["q_proj", "v_porj"]',
        r"lora_targets: no linear layer of tiny has a name that ends in 'v_porj'; their names end in down_proj, .*v_proj",
    ),
    ("grpo", "algorithm", 'lora_rank = 8\nlora_targets = ["lm_head"]', r"no linear layer of tiny has a name that ends in 'lm_head'"),
    ("grpo", "algorithm", "ratio_error_limit = 0", r"ratio_error_limit = 0: it must be at least 1e-05 and less than 1, because"),
    ("grpo", "algorithm", "ratio_error_limit = 10", r"ratio_error_limit = 10: it must be .*less than 1, .*greater bound stops nothing"),
    ("verl", "algorithm", "ratio_error_limit = 1.0", r"ratio_error_limit = 1\.0: it must be .*less than 1, .*leave it out for 0\.1"),
    ("grpo", "algorithm", "lora_alpha = 16", r"without lora_rank there is none: give it, or leave them out"),
    ("grpo", "algorithm", "temperature = 1e-30", r"temperature = 1e-30: it must be at least 0\.01"),
    ("grpo", "algorithm", "lora_rank = 0", r"lora_rank = 0: it must be at least 1"),
    ("grpo", "algorithm", "lora_rank = 65", r"lora_rank = 65: it must be at most 64, because that is the hidden size of tiny"),
    ("grpo", "algorithm", 'device = "gpu"', r"device = \"gpu\": it is no device of torch.*leave it out for \"cpu\""),
    (
        "grpo",
        "algorithm",
        'device = "cuda:99"',
        r"device = \"cuda:99\": this machine has .* of type cuda; run the job on one that has it, or leave it out for \"cpu\"$",
    ),
    ("grpo", "algorithm", 'device = "meta"', r"device = \"meta\": this machine has no device of type meta"),
    ("grpo", "algorithm", "threads = 0", r"threads = 0: it must be at least 1 and at most 256.*leave it out for 1"),
    ("grpo", "algorithm", "threads = 100000", r"threads = 100000: it must be .*at most 256"),
    ("grpo", "algorithm", "probe_tolerance = 0", r"probe_tolerance = 0: it must be at least 1e-05 and less than 1"),
    # schedule
    ("grpo", "algorithm", "max_steps = 0", r"max_steps = 0: it must be at least 1 .*leave it out for 200"),
    ("grpo", "algorithm", 'max_steps = "many"', r"max_steps = \"many\": it must be an integer"),
    ("grpo", "algorithm", "target_score = inf", r"target_score = Infinity: it must be a finite number"),
    ("grpo", "algorithm", "score_window = 0", r"score_window = 0: it must be at least 1 .*leave it out for 5"),
    ("grpo", "algorithm", "seed = -1", r"seed = -1: it must be at least 0"),
    ("grpo", "algorithm", "val_every = -1", r"val_every = -1: it must be at least 0"),
    ("sft", "algorithm", "val_every = 2.5", r"val_every = 2\.5: it must be an integer"),
    ("grpo", "algorithm", "checkpoint_every_steps = 0", r"checkpoint_every_steps = 0: it must be at least 1"),
    ("grpo", "algorithm", "checkpoint_every_minutes = -1", r"checkpoint_every_minutes = -1: it must be 0, or at least 0\.01"),
    ("grpo", "algorithm", "keep_checkpoints = 0", r"keep_checkpoints = 0: it must be at least 1 .*leave it out for 2"),
    ("grpo", "algorithm", 'metrics = ["paper"]', r"metrics has 'paper': it must be one of tensorboard, wandb, plots"),
    ("grpo", "algorithm", 'metrics = "plots"', r"metrics = \"plots\": it must be a list"),
    # objective
    ("grpo", "algorithm", "clip = 0", r"clip = 0: it must be at least 1e-05 and less than 1"),
    ("grpo", "algorithm", "clip = 1.5", r"clip = 1\.5: it must be .*less than 1"),
    ("grpo", "algorithm", "clip_high = -0.1", r"clip_high = -0\.1: it must be at least 1e-05 and at most 100"),
    ("grpo", "algorithm", "dual_clip = 1.0", r"dual_clip = 1\.0: it must be at least 1\.01 and at most 1000"),
    ("grpo", "algorithm", "weight_cap = 1", r"weight_cap = 1: it must be at least 1\.01 and at most 1000, because it bounds ratios"),
    (
        "grpo",
        "algorithm",
        "weight_cap = 5.0\nclip_high = 0.28",
        r"weight_cap = 5 and clip_high = 0\.28: clip_high is of the clipped surrogate",
    ),
    ("grpo", "algorithm", 'average = "tokens"', r"average = \"tokens\": it must be 'token', .*did you mean token\?"),
    ("grpo", "algorithm", 'average = "constant"', r"constant_tokens = 0: it must be at least 1, because average = \"constant\""),
    ("grpo", "algorithm", "constant_tokens = -1", r"constant_tokens = -1: it must be at least 0"),
    ("grpo", "algorithm", "importance_cap = 0", r"importance_cap = 0: it must be at least 0\.1 and at most 1000"),
    ("grpo", "algorithm", "kl = -0.1", r"kl = -0\.1: it must be 0, or at least 1e-06"),
    # SFT
    ("sft", "algorithm", "top_fraction = 2.0", r"top_fraction = 2\.0: it must be at least 0\.0001 and at most 1"),
    ("sft", "algorithm", "min_reward = nan", r"min_reward = NaN: it must be a finite number"),
    ("sft", "algorithm", "best_of_group = 9", r"best_of_group = 9: it must be at most group_size \(8\)"),
    ("sft", "algorithm", "epochs = 0", r"epochs = 0: it must be at least 1 .*leave it out for 4"),
    ("sft", "algorithm", "batch_rows = 0", r"batch_rows = 0: it must be at least 1"),
    ("sft", "algorithm", "temperature = 0", r"temperature = 0: it must be greater than 0, because the 8 replies to a task would be equal"),
    ("sft", "algorithm", "max_grad_norm = -1", r"max_grad_norm = -1: it must be at least 0\.001"),
    ("sft", "algorithm", "max_tokens = 5000", r"max_tokens = 5000: it must be less than 1024"),
    ("sft", "algorithm", 'device = "cuda:99"', r"device = \"cuda:99\": this machine has"),
    ("sft", "algorithm", "updates_per_step = 2", r"unknown key updates_per_step: .*\(docs/sft-options\.md has all keys\)$"),
    # verl
    ("verl", "algorithm", "fill_reward = inf", r"fill_reward = Infinity: it must be a finite number"),
    ("verl", "algorithm", "seed = -1", r"seed = -1: it must be at least 0"),
    ("verl", "algorithm", "step_timeout_seconds = -1", r"step_timeout_seconds = -1: it must be at least 1 "),
    ("verl", "algorithm", "reward_wait_seconds = -1", r"reward_wait_seconds = -1: it must be at least 0 .*end of a rollout"),
    ("verl", "algorithm", 'credit = "mine.py:nothing"', r"mine\.py has no 'nothing'; its functions are"),
    ("verl", "algorithm", 'credit = "to_go"\nconfig.algorithm.adv_estimator = "gae"', r'adv_estimator = "gae" excludes credit = "to_go"'),
    ("verl", "algorithm", "reward_sources = []", r"reward_sources = \[\]: it must be .*non-empty, because a run without"),
    ("verl", "algorithm", "config.actor_rollout_ref.rollout.n = 1", r"rollout\.n is 1, .*Set n to at least 2"),
    ("verl", "algorithm", "config.data.train_batch_size = 0", r"data\.train_batch_size = 0: it must be at least 1"),
    ("verl", "algorithm", "config.actor_rollout_ref.rollout.temperature = 0", r"rollout\.temperature = 0: it must be at least 0\.01"),
    (
        "verl",
        "algorithm",
        "config.actor_rollout_ref.actor.optim.lr = -1e-6",
        r"optim\.lr = -1e-06: it must be 0, or at least 1e-12 and at most 1",
    ),
    ("verl", "algorithm", "config.actor_rollout_ref.actor.ppo_mini_batch_size = 9", r"ppo_mini_batch_size = 9: it must be at most .*\(8\)"),
    ("verl", "algorithm", 'config.trainer.device = "gpu"', r"trainer\.device = \"gpu\": it must be 'cpu'"),
    ("verl", "algorithm", 'config.trianer.device = "cpu"', r"unknown section trianer: did you mean trainer\?"),
    (
        *("verl", "algorithm", "config.data.max_prompt_length = 1000\nconfig.data.max_response_length = 100"),
        r"max_response_length = 100: with max_prompt_length \(1000\) it must be at most 1024.*give smaller ones",
    ),
    # searches for prompts, and the baseline
    ("apo", "algorithm", "beam_width = 0", r"beam_width = 0: it must be at least 1 .*leave it out for 4"),
    ("apo", "algorithm", "branch_factor = -1", r"branch_factor = -1: it must be at least 1"),
    ("apo", "algorithm", "beam_rounds = 0", r"beam_rounds = 0: it must be at least 1"),
    ("apo", "algorithm", "val_batch_size = 0", r"val_batch_size = 0: it must be at least 1"),
    ("apo", "algorithm", "diversity_temperature = 3.0", r"diversity_temperature = 3\.0: it must be at least 0 and at most 2"),
    ("apo", "algorithm", 'gradient_model = ""', r"gradient_model = \"\": it must be non-empty.*leave it out for \"gpt"),
    ("apo", "algorithm", "gradient_prompts = []", r"gradient_prompts = \[\]: it must be non-empty"),
    ("apo", "algorithm", "rollout_batch_timeout = 0", r"rollout_batch_timeout = 0: it must be at least 1"),
    ("apo", "algorithm", "max_editor_calls = 0", r"max_editor_calls = 0: it must be at least 1"),
    ("gepa", "algorithm", "minibatch_size = 0", r"minibatch_size = 0: it must be at least 1"),
    ("gepa", "algorithm", "max_iterations = 0", r"max_iterations = 0: it must be at least 1"),
    ("gepa", "algorithm", "max_merges = -1", r"max_merges = -1: it must be at least 0"),
    ("gepa", "algorithm", "perfect_reward = nan", r"perfect_reward = NaN: it must be a finite number"),
    ("gepa", "algorithm", 'reflect_prompt = "gone.poml"', r"reflect_prompt: there is no file .*gone\.poml"),
    ("gepa", "algorithm", "beam_width = 2", r"unknown key beam_width: leave it out \(docs/job-options\.md has all keys\)$"),
    ("random_search", "algorithm", "choices = []", r"choices = \[\]: it must be non-empty"),
    ("random_search", "algorithm", "choices =", r"choices is missing: it must be given"),
    ("random_search", "algorithm", 'choices = { q = ["x"] }', r"RandomSearch has choices for q: the initial resources' prompts are prompt"),
    ("random_search", "algorithm", "n_trials = 0", r"n_trials = 0: it must be at least 1"),
    ("baseline", "algorithm", "n_epochs = 0", r"n_epochs = 0: it must be at least 1"),
    ("baseline", "algorithm", "train_split = 1.0", r"train_split = 1\.0: it must be greater than 0 and less than 1"),
    ("baseline", "algorithm", "polling_interval = 0", r"polling_interval = 0: it must be greater than 0"),
    ("baseline", "algorithm", 'span_verbosity = "all"', r"span_verbosity = \"all\": it must be 'keys'"),
    # options that contradict each other, and values that nobody means
    (
        "grpo",
        "algorithm",
        "constant_tokens = 64",
        r"constant_tokens = 64 has no effect with average = \"token\": give average = \"constant\"",
    ),
    ("grpo", "algorithm", "max_staleness = 1", r"max_staleness = 1 has no effect without groups_in_flight.*or leave it out"),
    (
        "grpo",
        "algorithm",
        "warmup_steps = 6\nmax_steps = 5",
        r"warmup_steps = 6: it must be at most max_steps \(5\), because the run would end",
    ),
    ("grpo", "algorithm", "step_timeout_seconds = 10", r"timeout_seconds = 120: it must be at most step_timeout_seconds \(10\), because"),
    ("grpo", "agent", "timeout_seconds = 700", r"timeout_seconds = 700: it must be at most step_timeout_seconds \(600\), because"),
    ("sft", "agent", "timeout_seconds = 700", r"timeout_seconds = 700: it must be at most step_timeout_seconds \(600\), because"),
    ("verl", "algorithm", "step_timeout_seconds = 100", r"timeout_seconds = 120: it must be at most step_timeout_seconds \(100\), because"),
    ("grpo", "algorithm", "step_timeout_seconds = 1e-9", r"step_timeout_seconds = 1e-09: it must be at least 1 .*take seconds"),
    ("grpo", "agent", "timeout_seconds = 1e-9", r"timeout_seconds = 1e-09: it must be at least 0\.1 .*before a call has been made"),
    ("grpo", "algorithm", "learning_rate = 1e-300", r"learning_rate = 1e-300: it must be 0, or at least 1e-12 .*leave it out"),
    ("verl", "algorithm", "config.actor_rollout_ref.actor.optim.lr = 1e-300", r"optim\.lr = 1e-300: it must be 0, or at least 1e-12"),
    (
        "grpo",
        "algorithm",
        "metrics = [3]",
        r"metrics has 3, a int without begin\(\): it must be one of tensorboard, wandb, plots, or a MetricSink",
    ),
    (
        "grpo",
        "algorithm",
        'attention = "flex_attention"',
        r"attention = \"flex_attention\": it must be one of eager, sdpa with device = \"cpu\"",
    ),
    ("grpo", "algorithm", 'attention = "paged|eager"', r"attention = \"paged\|eager\": it must not be paged.*give \"eager\""),
    # functions that cannot be called as a run calls them
    (
        "grpo",
        "agent",
        'grader = "mine.py:tasks"',
        r"grader: grader tasks\(\) is called with \(task, answer\): too many.*let it take these two",
    ),
    ("grpo", "agent", 'grader = "mine.py:agent"', r"grader: grader agent\(task\) is called with \(task, answer\): too many"),
    (
        "grpo",
        "agent",
        'grader = "mine.py:three"',
        r"grader: grader three\(a, b, c\) is called with \(task, answer\): missing a required argument: 'c'",
    ),
    (
        "baseline",
        "agent",
        'grader = "mine.py:named"',
        r"grader: grader named\(\*, task, answer\) is called with \(task, answer\): too many",
    ),
    ("apo", "agent", 'grader = "mine.py:stream"', r"grader: stream is a generator, and its value is needed: return it"),
    (
        "grpo",
        "agent",
        'function = "mine.py:three"',
        r"function: three takes a, b, c, which nothing fills: there are task, .* keys question",
    ),
    ("sft", "agent", 'function = "mine.py:stream"', r"function: stream is a generator, and its value is needed"),
    # values of the right type that no run can mean
    *(
        ("grpo", "algorithm", lines, says)
        for lines, says in [
            (
                "max_grad_norm = 1e-300",
                r"max_grad_norm = 1e-300: it must be at least 0\.001 and at most 1e\+09, because .*leave it out for 1\.0",
            ),
            ("max_grad_norm = 1e300", r"max_grad_norm = 1e\+300: it must be .*1e9 never clips"),
            ("kl = 1e-300", r"kl = 1e-300: it must be 0, or at least 1e-06 and at most 1000, because .*leave it out for 0\.0"),
            ("clip = 1e-300", r"clip = 1e-300: it must be at least 1e-05 .*rounding alone.*leave it out for 0\.2"),
            ("clip_high = 1e-300", r"clip_high = 1e-300: it must be at least 1e-05 "),
            ("clip_high = 1e9", r"clip_high = 1000000000\.0: it must be .*at most 100, because .*leave it out"),
            ("dual_clip = 1e30", r"dual_clip = 1e\+30: it must be .*at most 1000"),
            ("weight_cap = 1e30", r"weight_cap = 1e\+30: it must be .*at most 1000"),
            ("importance_cap = 1e-30", r"importance_cap = 1e-30: it must be at least 0\.1 and at most 1000"),
            ("importance_cap = 1e30", r"importance_cap = 1e\+30: it must be .*at most 1000"),
            ("constant_tokens = 1000000000000", r"constant_tokens = 1000000000000: it must be .*at most 100000000"),
            ("probe_tolerance = 1e-30", r"probe_tolerance = 1e-30: it must be at least 1e-05 .*rounding alone"),
            ("ratio_error_limit = 1e-30", r"ratio_error_limit = 1e-30: it must be at least 1e-05 .*leave it out for 0\.1"),
            ("lora_rank = 8\nlora_alpha = 1e-300", r"lora_alpha = 1e-300: it must be at least 0\.01 and at most 1000000, because"),
            ("lora_rank = 8\nlora_alpha = 1e30", r"lora_alpha = 1e\+30: it must be .*at most 1000000"),
            ("minibatches = 10000", r"minibatches = 10000: it must be at least 1 and at most 1000, because .*leave it out for 1"),
            ("target_score = 1e10", r"target_score = 10000000000\.0: it must be at least -1e\+09 and at most 1e\+09"),
            ("prompts_per_step = 100000\ngroup_size = 10000", r"make 1000000000 rollouts a step: they must be at most 1000000, because"),
            ("checkpoint_every_minutes = 1e-300", r"checkpoint_every_minutes = 1e-300: it must be 0, or at least 0\.01"),
            (
                "checkpoint_every_minutes = 5\ncheckpoint_every_steps = 5",
                r"checkpoint_every_minutes = 5 has no effect with checkpoint_every_s",
            ),
            ('device = "cpu:7"', r"device = \"cpu:7\": a machine has one device of type cpu; give \"cpu\""),
            ('attention = " "', r"attention = \" \": it must be non-empty"),
        ]
    ),
    ("sft", "algorithm", "top_fraction = 1e-300", r"top_fraction = 1e-300: it must be at least 0\.0001 .*almost 0 leaves none"),
    ("sft", "algorithm", "temperature = 1e-30", r"temperature = 1e-30: it must be 0, or at least 0\.01 and at most 5"),
    ("sft", "algorithm", "min_reward = 2e9", r"min_reward = 2000000000\.0: it must be .*at most 1e\+09"),
    ("sft", "algorithm", "prompts_per_step = 100000\ngroup_size = 10000", r"make 1000000000 rollouts a step"),
    ("apo", "algorithm", 'gradient_model = "  "', r"gradient_model = \"  \": it must be non-empty"),
    ("apo", "algorithm", "temperature = 1.5", r"unknown key temperature: did you mean diversity_temperature\?"),
    ("apo", "algorithm", "beam_width = 1000\nbranch_factor = 1000", r"make 1000000 edits a round: they must be at most 10000, because"),
    ("apo", "algorithm", 'gradient_prompts = ["mine.py"]', r"gradient_prompts: prompt file .*mine\.py is not POML: .*name a prompt file"),
    (
        "apo",
        "algorithm",
        'edit_prompts = ["names.poml"]',
        r"edit_prompts: prompt file .*asks for \{\{ samples \}\}: there are prompt, critique",
    ),
    ("gepa", "algorithm", 'reflect_prompt = "mine.py"', r"reflect_prompt: prompt file .*mine\.py is not POML"),
    ("gepa", "algorithm", 'reflection_model = " "', r"reflection_model = \" \": it must be non-empty"),
    ("gepa", "algorithm", "rollout_batch_timeout = 1e-9", r"rollout_batch_timeout = 1e-09: it must be at least 1 .*take"),
    ("gepa", "agent", "timeout_seconds = 5000", r"timeout_seconds = 5000: it must be at most rollout_batch_timeout \(3600\), because"),
    ("apo", "algorithm", "max_rollouts = 1", r"max_rollouts = 1: it must be at least 2, the tasks of \[data\] val, because"),
    ("apo", "algorithm", "max_rollouts = 100000000000000000000", r"max_rollouts = 1\d+: it must be at least 1 and at most 1000000000"),
    ("apo", "resources", 'prompt = "  "', r"prompt is empty: it must be the prompt to begin with; write it"),
    ("apo", "editor", 'base_url = "http://host:99999"', r"base_url = .*: it must be an address such as"),
    # paths and functions of the wrong kind
    ("grpo", "data", 'train = "mine.py:text"', r"train = 'mine\.py:text' gives a str: it must be a list of tasks; return one"),
    ("apo", "data", 'val = "mine.py:table"', r"val = 'mine\.py:table' gives a dict: it must be a list of tasks"),
    (
        "sft",
        "data",
        'train = "mine.py:objects"',
        r"train = 'mine\.py:objects': task 1 is no JSON value: .*object.*; return tasks of tables",
    ),
    ("gepa", "data", 'train = "mine.py:infinite"', r"train = 'mine\.py:infinite': task 2 is no JSON value: .*NaN or Infinity"),
    (
        "grpo",
        "data",
        'train = "tasks.jsonl"\noptions = { size = 3 }',
        r"options = .* has no effect on files: name functions .*or leave it out",
    ),
    ("grpo", "data", 'train = "."', r"train = '\.' cannot be read: .*directory"),
    ("grpo", "agent", 'function =\ncommand = ["python", "folder.py"]', r"command: there is no file .*folder\.py"),
    ("grpo", "agent", "runners = 1000\nconcurrency = 10000", r"make 10000000 rollouts at a time: they must be at most 100000, because"),
    ("grpo", "policy", f"{VLLM}gpu_memory_utilization = 1e-9", r"gpu_memory_utilization = 1e-09: it must be at least 0\.01"),
    # arguments of vLLM
    *(
        ("grpo", "policy", f"{VLLM}vllm_options = {given}", says)
        for given, says in [
            (
                '["--max-model-len", "0"]',
                r"--max-model-len 0: it must be a number of tokens, at least 1, .*leave it out for the model's own",
            ),
            ('["--max-model-len=abc"]', r"--max-model-len abc: it must be a number of tokens"),
            ('["--max-model-len"]', r"--max-model-len : it must be a number of tokens"),
            ('["--max_model_len", "2k"]', r"--max-model-len 2000: it must be at most 1024, the context of tiny"),
            ('["--load-format", "dummy"]', r"has --load-format, but the server must load the weights that the run writes: leave it out"),
            ('["-q", "fp8"]', r"has -q, but quantised weights sample other tokens"),
            ('["--quantization=fp8"]', r"has --quantization, but quantised weights"),
            ('["--tokenizer", "other"]', r"has --tokenizer, but the trainer has the model's own"),
            ('["--hf-overrides.rope_theta", "1e6"]', r"has --hf-overrides, but the trainer reads the model's own config\.json"),
            ('["--runner", "pooling"]', r"has --runner, but the policy generates text"),
            ('["--override-generation-config", "{}"]', r"has --override-generation-config, but the trainer assumes samples"),
            ('["--config", "vllm.yaml"]', r"has --config, but the run sets the server's arguments"),
            ('["--api-key", "secret"]', r"has --api-key, but the run sets the server's arguments and its access"),
            ('["--uds", "/tmp/s"]', r"has --uds, but the run calls the server at an address of its own"),
            ('["--rope-theta", "1e6"]', r"has --rope-theta, but the trainer reads the model's own config\.json"),
            ('["--disable-sliding-window"]', r"has --disable-sliding-window, but the trainer's attention"),
            ('["--help"]', r"has --help, but vLLM would print and end"),
            ('["--enforce-eager", ""]', r"vllm_options = .*: an argument is empty; leave it out"),
            ('["--max-num-seqs", "0"]', r"--max-num-seqs 0: it must be at least 1, because .*leave it out"),
            ('["--max-num-batched-tokens=-1"]', r"--max-num-batched-tokens -1: it must be at least 1"),
            ('["--swap-space", "-1"]', r"--swap-space -1: it must be at least 0, because it is a size in GiB; .*leave it out"),
            ('["--cpu-offload-gb=lots"]', r"--cpu-offload-gb lots: it must be at least 0"),
            ('["--sliding-window", "64"]', r"has --sliding-window, but the trainer's attention has the window .*: leave it out"),
            ('["--enable-prompt-embeds"]', r"has --enable-prompt-embeds, but a prompt of embeddings has no token ids"),
            ('["--dtype", "int8"]', r"--dtype int8: it must be one of auto, half, .*leave it out"),
            ('["-tp", "2"]', r"--tensor-parallel-size 2: the product must be 1, the number of GPUs in devices"),
            ('["--tensor-parallel-size=two"]', r"--tensor-parallel-size two: the product must be 1"),
            (
                '["-tp", "1", "--pipeline_parallel_size", "2"]',
                r"--tensor-parallel-size 1 --pipeline-parallel-size 2: the product must be 1",
            ),
        ]
    ),
]
"""(algorithm of a good job, table, the key that makes it faulty, the message); `key =` removes the key."""


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the editor of prompt searches its key."""
    monkeypatch.setenv("OPENAI_API_KEY", "any")


def write_job(folder: Path, algorithm: str, table: str = "agent", fault: str = "", *, after: str = "") -> Path:
    """Write a good job of the algorithm, with the lines of `fault` in a table."""
    content = {
        "agent": dict(AGENT),
        "data": dict(DATA),
        "resources": dict(PROMPT) if algorithm in ("apo", "gepa", "random_search") else {},
        "algorithm": {"name": f'"{algorithm}"', **GOOD[algorithm]},
    }
    for line in fault.splitlines():
        name, _, value = line.partition("=")
        content.setdefault(table, {})[name.strip()] = value.strip()
    (folder / "mine.py").write_text(MINE)
    (folder / "tasks.jsonl").write_text('{"question": "!"}\n' * 2)
    (folder / "folder.py").mkdir(exist_ok=True)
    (folder / "names.poml").write_text('<poml><p for="sample in samples">{{ sample.task }}</p></poml>')
    lines: list[str] = []
    for name in TABLES if "improve" in content else TABLES_OF_RUNS:
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in content.get(name, {}).items() if value)]
    (folder / "job.toml").write_text("\n".join(lines) + after)
    return folder / "job.toml"


async def problems_of(job: Path) -> list[str]:
    """All problems of a job but that of verl's extra, which is not installed everywhere."""
    return [problem for problem in (await check_job(job)).problems if "[verl] extra" not in problem]


@pytest.mark.parametrize("algorithm", GOOD)
async def test_the_job_without_a_fault_is_accepted(tmp_path: Path, algorithm: str) -> None:
    assert await problems_of(write_job(tmp_path, algorithm)) == []


async def test_a_missing_file_of_a_command_hides_no_other_fault_of_it(tmp_path: Path) -> None:
    found = await problems_of(write_job(tmp_path, "grpo", "agent", 'command = ["python", "away.py", "{questoin}"]'))
    assert len(found) == 2 and "questoin" in found[0] and "away.py" in found[1]


@pytest.mark.parametrize(("algorithm", "table", "fault", "says"), FAULTS, ids=[f"{row[0]}-{row[1]}-{row[2]}" for row in FAULTS])
async def test_a_job_with_one_fault_is_refused_by_key_bound_and_remedy(
    tmp_path: Path, algorithm: str, table: str, fault: str, says: str
) -> None:
    (problem,) = await problems_of(write_job(tmp_path, algorithm, table, fault))
    assert re.search(says, problem), problem
    assert problem.startswith((f"[{table}] ", "[agent] ", "[data] ")) or "no program" in problem, problem


@pytest.mark.parametrize(
    ("after", "says"),
    [
        ("\n[polcy]\n", r"unknown table \[polcy\]: did you mean policy\?"),
        ("\n[training]\n", r"unknown table \[training\]: leave it out \(docs/job-options\.md has all keys\)$"),
        ("\nname = 3", r"job\.toml is not TOML: "),
        (f"\nname = {'[' * 5000}", r"job\.toml holds arrays or tables within each other, too many to be read"),
    ],
)
async def test_unknown_tables_and_files_that_are_not_toml_are_refused(tmp_path: Path, after: str, says: str) -> None:
    (problem,) = await problems_of(write_job(tmp_path, "grpo", after=after))
    assert re.search(says, problem), problem


@pytest.mark.parametrize("line", ["agent = 3", 'folder = "elsewhere"', "resources = []"])
async def test_values_in_the_place_of_tables_are_refused(tmp_path: Path, line: str) -> None:
    name = line.partition(" ")[0]
    job = write_job(tmp_path, "grpo")
    rest = job.read_text().replace(f"[{name}]\n" + ("function = " + AGENT["function"] if name == "agent" else ""), "")
    job.write_text(f"{line}\n{rest}")
    (problem,) = await problems_of(job)
    assert re.match(rf"{name} = .*it must be a table|unknown table \[{name}\]", problem), problem


def test_the_faults_are_more_than_a_hundred_and_of_every_table() -> None:
    assert len(FAULTS) > 150 and {row[1] for row in FAULTS} == set(TABLES) and {row[0] for row in FAULTS} == set(GOOD)


@pytest.mark.parametrize("fault", [row for row in FAULTS if row[0] != "verl"][::8], ids=lambda row: f"{row[0]}-{row[2]}")
def test_a_run_refuses_the_same_before_it_starts_anything(
    tmp_path: Path, fault: tuple[str, str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm, table, lines, says = fault
    with pytest.raises(SystemExit) as ended:
        main(["train", str(write_job(tmp_path, algorithm, table, lines)), "--data-dir", str(tmp_path / "data")])
    captured = capsys.readouterr()
    assert ended.value.code == 2 and re.search(says, captured.err), captured.err
    assert "starting the stack" not in captured.err and not (tmp_path / "data").exists()


async def test_a_learning_rate_of_0_is_accepted_and_said(tmp_path: Path) -> None:
    found = await check_job(write_job(tmp_path, "grpo", "algorithm", "learning_rate = 0"))
    assert found.problems == [] and any("learning_rate = 0 is a control experiment" in note for note in found.notes)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("max_steps = 5\nval_every = 10", r"val_every = 10 is more than max_steps \(5\): the run validates only before"),
        ("max_steps = 3\ntarget_score = 0.9", r"score_window = 5 is more than max_steps \(3\): target_score .* cannot end the run"),
        ("score_window = 3", r"score_window = 3 has no effect without target_score"),
        ("minibatches = 129", r"minibatches = 129 is more than a step's 128 rollouts \(prompts_per_step \* group_size\)"),
        (
            "groups_in_flight = 49",
            r"groups_in_flight = 49 is more than prompts_per_step \* \(max_staleness \+ 1\) = 48: some steps take more",
        ),
        ('offline_mode = "production"\ngroup_size = 4', r'group_size without effect: offline_mode = "production" takes'),
        ('selection = "hard@2"\nprompts_per_step = 4', r'prompts_per_step without effect: selection = "hard@2" takes'),
    ],
)
async def test_what_has_no_effect_is_warned_of(tmp_path: Path, lines: str, says: str) -> None:
    found = await check_job(write_job(tmp_path, "grpo", "algorithm", lines))
    (warning,) = found.warnings
    assert found.problems == [] and re.match(says, warning), warning


GENEROUS = {
    "grpo": [
        "clip = 3e-4\nclip_high = 4e-4\nsequence_ratio = true", "clip_high = 5.0", "max_grad_norm = 0.01", "max_grad_norm = 1e9",
        "kl = 1e-5", "kl = 0", "lora_rank = 8\nlora_alpha = 1", "lora_rank = 8\nlora_alpha = 512", "importance_cap = 0.9",
        "probe_tolerance = 1e-4", "ratio_error_limit = 0.01", "target_score = 1e8", "minibatches = 128", "dual_clip = 1.5",
        "weight_cap = 1.05",
        "groups_in_flight = 48", "prompts_per_step = 512\ngroup_size = 64", "checkpoint_every_minutes = 0", "learning_rate = 1e-9",
        "temperature = 0.01",
        'average = "constant"\nconstant_tokens = 3000',
    ],
    "sft": ["temperature = 0\ngroup_size = 1", "temperature = 0.01", "top_fraction = 0.001"],
    "apo": ["max_rollouts = 2", "beam_width = 100\nbranch_factor = 100", "diversity_temperature = 0"],
    "gepa": ["temperature = 1.5", "perfect_reward = 100"],
}  # fmt: skip


@pytest.mark.parametrize(("algorithm", "lines"), [(name, lines) for name, many in GENEROUS.items() for lines in many])
async def test_values_that_a_run_may_need_are_accepted(tmp_path: Path, algorithm: str, lines: str) -> None:
    found = await check_job(write_job(tmp_path, algorithm, "algorithm", lines))
    assert (found.problems, found.warnings) == ([], [])


@pytest.mark.parametrize("line", ["canary = 0.05", "canary = [0.05]", "canary = [0.05, 0.3]"])
async def test_a_canary_has_a_step_or_several(tmp_path: Path, line: str) -> None:
    assert (await check_job(write_job(tmp_path, "grpo", "improve", line))).problems == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ('["--kv-cache-dtype", "fp8"]', r"--kv-cache-dtype fp8: keys and values are rounded .* ratio_error_limit"),
        ('["--calculate-kv-scales"]', r"--calculate-kv-scales: keys and values are scaled"),
        ('["--speculative_config={}"]', r"--speculative-config \{\}: not every release"),
        ('["--dtype", "half"]', r"--dtype half: its range is smaller"),
    ],
)
async def test_arguments_of_vllm_that_change_what_is_sampled_are_warned_of(tmp_path: Path, options: str, says: str) -> None:
    found = await check_job(write_job(tmp_path, "grpo", "policy", f"{VLLM}vllm_options = {options}"))
    (warning,) = found.warnings
    assert found.problems == [] and re.match(r"\[policy\] vllm_options has " + says, warning), warning


async def test_arguments_of_vllm_that_change_no_sample_are_not_warned_of(tmp_path: Path) -> None:
    options = '["--kv-cache-dtype", "auto", "--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "64", "--chat-template", "x.jinja"]'
    found = await check_job(write_job(tmp_path, "grpo", "policy", f"{VLLM}vllm_options = {options}"))
    assert (found.problems, found.warnings) == ([], [])


async def test_nothing_is_said_of_the_default_in_place_of_a_wrong_device(tmp_path: Path) -> None:
    found = await check_job(write_job(tmp_path, "grpo", "algorithm", 'device = "cuda:99"'))
    assert found.memory is None and not any("sampled" in note for note in found.notes)

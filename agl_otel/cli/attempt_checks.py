"""Check one attempt of a user's own agent for all that training needs, in the order in which one thing causes the next. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters import remedies
from agl_otel.adapters.sampling import IN_A_JOB, UNSENT, Assumed, own_temperature_of, several_choices_warning, unlike, unsent_of
from agl_otel.adapters.split_reasons import SPLIT_REASONS
from agl_otel.adapters.trajectories import ATTEMPT_REFUSALS, CALL_REFUSALS, final_reward, to_trajectories
from agl_otel.cli.findings import Check, Finding, advice, good, walk, wrong
from agl_otel.cli.once import FinishedAttempt
from agl_otel.cli.output import counted
from agl_otel.runner.injection import install_line
from agl_otel.spans.calls import UPSTREAM, error_of_call
from agl_otel.text import printable
from agl_otel.types import TAKEN_VERDICTS, Span
from agl_otel.types.columns import CallColumns
from agl_otel.types.sampling import LEAST_TEMPERATURE, LIMITS, SHAPES
from agl_otel_hook import conventions

AFTER_COMMAND: Final = ("hook", "calls", "spans", "ids", "logprobs", "reward", "stored", "trajectories", "refused")
AFTER_CALLS: Final = ("spans", "ids", "logprobs", "trajectories", "refused")
DSPY: Final = (
    "DSPy keeps replies in a cache on the disk, so that a repeated task calls nothing: "
    "dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)"
)
OVERRIDDEN: Final = "Overriding of current TracerProvider is not allowed"
"""What OpenTelemetry prints where an agent sets a provider of its own under the hook."""
KEEP_COPY: Final = (
    "the hook's provider is there first, so spans made by libraries go to this stack alone. "
    "To keep the copy, start the stack with AGL_FORWARD_OTLP=ADDRESS (and AGL_FORWARD_HEADERS)"
)
PROTOCOL: Final = "let the agent use one of the protocols that the proxy has (docs/model-servers.md#the-protocols-of-agents)"
COMMAND: Final = "the command ended well"
STORED: Final = "everything it emitted is stored"
PROVIDER: Final = "its telemetry goes where it went before"
_GRADER: Final = "grader "
"""How the error of an attempt begins that its grader failed (runner/job.py)."""
_FIELDS: Final = (*SHAPES, *LIMITS, "temperature", "max_completion_tokens", "seed", "tools", "parallel_tool_calls", "reasoning_effort")
"""Fields of requests that a model server may refuse."""
_NO_ROUTE: Final = 501
"""The proxy's status for a call in a protocol that the model server lacks."""


def examine(once: FinishedAttempt, before: Sequence[Finding] = ()) -> list[Finding]:
    """Check one attempt and its spans. `before`: what was found around it, such as variables that switch its telemetry off."""
    return walk(CHECKS, once, before)


def wrong_in(once: FinishedAttempt) -> list[Finding]:
    """Return what `agl-otel run` tells besides the error and the verdict, which it shows: what else is wrong, and lost telemetry."""
    return [each for each in examine(once) if (each.state == "wrong" and each.what not in (COMMAND, STORED)) or each.what == PROVIDER]


def _answers(once: FinishedAttempt) -> Finding | None:
    what = "the model answers its calls"
    calls = sorted(_proxied(once), key=lambda span: (span.start_time or 0, span.sequence_id))
    failed = [span for span in calls if _failure(span)]
    if not calls:
        return None
    if not failed:
        return good(what, f"{_calls_in(calls)} of {_calls_in(calls)}")
    last = failed[-1]
    detail = f"{_calls_in(calls) - _calls_in(failed)} of {_calls_in(calls)}: {_failure(last)}"
    if _calls_in(failed) < _calls_in(calls) and (once.rollout.status == "succeeded" or not _failure(calls[-1])):
        return advice(what, detail, "calls without an answer are not trained on")
    return wrong(what, detail, _remedy_of(last), spoils=("command", *AFTER_COMMAND))


def _remedy_of(span: Span) -> str:
    status = span.attributes.get("http.response.status_code")
    if span.attributes.get(conventions.LLM_INCOMPLETE) in ("upstream_error", "upstream_timeout"):
        return (
            "is the model server up, and is its address right? That is OPENAI_BASE_URL of this command, else AGL_UPSTREAM_URL, "
            "else OpenAI's, which needs OPENAI_API_KEY; in a training, the endpoint of the resource main_llm"
        )
    if status == _NO_ROUTE:
        return "let the agent use chat/completions, or set AGL_LITELLM, so that such calls are translated"
    if status == 404:
        return "is the model's name one that the server has (OPENAI_MODEL), and does its address end in /v1?"
    if status in (401, 403):
        return "set OPENAI_API_KEY (of a stack that runs already: AGL_UPSTREAM_KEY) to a key of this server"
    if status in (400, 422):
        words = set(re.findall(r"\w+", span.status.description or ""))
        named = ", ".join(name for name in _FIELDS if name in words)
        if named:
            return (
                f"the model server does not take {named} as the agent sends it: leave it out of the agent's requests, "
                "or use a server that takes it"
            )
        return "change what the model server refuses in the agent's requests, or use a server that takes it"
    return "see the log of the model server"


def _failure(span: Span) -> str:
    """Return why a call has no answer; empty if it has one."""
    status = span.attributes.get("http.response.status_code")
    incomplete = str(span.attributes.get(conventions.LLM_INCOMPLETE, ""))
    if not (isinstance(status, int) and status >= 400) and not incomplete.startswith(UPSTREAM):
        return ""
    said = span.status.description or incomplete
    if status == _NO_ROUTE:
        protocol = "Messages (of Anthropic)" if span.attributes.get("gen_ai.provider.name") == "anthropic" else "Responses (of OpenAI)"
        return f"the model server does not have the protocol of the call, {protocol}"
    return error_of_call(status if isinstance(status, int) else 0, said)


def _command(once: FinishedAttempt) -> Finding:
    what, attempt = COMMAND, once.rollout.attempt
    if once.rollout.status == "succeeded" or _by_grader(once):
        return good(what, "exit code 0")
    error, *more = (attempt.error or once.rollout.status).split("\n")  # the exception, and then its traceback (runner/output.py)
    if attempt.status == "timeout":
        return wrong(what, error, "give it longer: --timeout SECONDS", more, spoils=AFTER_COMMAND)
    return wrong(what, error, "run it by hand and mend it first", more, spoils=AFTER_COMMAND)


def _by_grader(once: FinishedAttempt) -> bool:
    return once.graded and once.rollout.attempt.status == "failed" and (once.rollout.attempt.error or "").startswith(_GRADER)


def _hook(once: FinishedAttempt) -> Finding | None:
    what, ledger = "it runs under the hook", once.rollout.attempt.ledger
    if ledger is None:
        return None
    processes = [record for record in ledger.processes if not record.runner]
    if processes or _own(once):
        return good(what, f"{len(processes)} process{'es' if len(processes) != 1 else ''}" if processes else "yes")
    command = printable(ledger.command)
    if ledger.reach == "hooked":
        remedy = (
            "does it replace its process, its environment (env={…} without **os.environ) or Python's path (python -I, -S, -E)? "
            "Then the hook is not loaded: pass the environment on"
        )
        return wrong(what, f"it was loaded in no process of {command}", remedy, spoils=("calls", "stored", *AFTER_CALLS))
    if Path(ledger.command.split(" ")[0]).name.startswith("python"):
        remedy = (
            "it is loaded when OpenTelemetry, a model's SDK or a framework is imported, in Python 3.10 to 3.13 with OpenTelemetry's SDK: "
            f"--inject brings that, or {install_line()} into its environment"
        )
    else:
        remedy = (
            "its model calls are recorded all the same. Its own spans are, too, if they come from Python 3.10 to 3.13 with "
            "OpenTelemetry's SDK, which --inject brings, and with the environment of its command (not python -I, -E or -S)"
        )
    return advice(what, f"no: it was loaded in no process of {command}", remedy)


def _calls(once: FinishedAttempt) -> Finding:
    what, calls = "its model calls pass through the proxy", _proxied(once)
    detail = counted(_calls_in(calls), "call") if calls else "none"
    if once.unknown_paths:
        detail = f"{detail}; {_at_unknown_paths(once.unknown_paths)}"
        return advice(what, detail, PROTOCOL) if calls else wrong(what, detail, PROTOCOL, spoils=AFTER_CALLS)
    if calls:
        return good(what, detail)
    remedy = "the agent must take its model's address from OPENAI_BASE_URL (or OPENAI_API_BASE, ANTHROPIC_BASE_URL, GOOGLE_GEMINI_BASE_URL)"
    if others := [span for span in _own(once) if "gen_ai.request.model" in span.attributes or "llm.model_name" in span.attributes]:
        hosts = sorted({host for span in _own(once) if (host := _host(span))})
        detail = f"none; its own spans show {counted(len(others), 'call')}{' to ' + ', '.join(hosts) if hosts else ''}"
        remedy = f"its code names the model's address: {remedy}"
    if "dspy" in once.packages:
        remedy = f"{remedy}. {DSPY}"
    return wrong(what, detail, remedy, spoils=AFTER_CALLS)


def _at_unknown_paths(counts: Mapping[str, int]) -> str:
    several = len(counts) > 1
    paths = ", ".join(f"{printable(path)} ({count})" if several else printable(path) for path, count in counts.items())
    return f"{counted(sum(counts.values()), 'request')} came at {'paths' if several else 'a path'} that it does not have: {paths}"


def _host(span: Span) -> str:
    given = span.attributes.get("server.address") or span.attributes.get("url.full") or span.attributes.get("http.url") or ""
    return (urlsplit(str(given)).hostname or "") if "://" in str(given) else printable(str(given))


def _spans(once: FinishedAttempt) -> Finding | None:
    what, own, ledger = "its own spans arrive, with ids and marker", _own(once), once.rollout.attempt.ledger
    if own:
        return good(what, counted(len(own), "span"))
    if ledger is not None and ledger.reach != "hooked":
        return None
    remedy = (
        "to see its steps, install the instrumentation of a library that it uses (opentelemetry-instrumentation-…), "
        "or switch on its framework's own telemetry. Its model calls are recorded all the same"
    )
    return advice(what, "none", remedy) if _proxied(once) else wrong(what, "none", remedy)


def _provider(once: FinishedAttempt) -> Finding | None:
    if OVERRIDDEN not in once.printed:
        return None
    return advice(PROVIDER, "no: its code sets a tracer provider of its own, which is not used", KEEP_COPY)


def _ids(once: FinishedAttempt) -> Finding:
    calls = once.traces.calls
    what, (with_ids, answered) = "token ids come with them", _calls_with(calls, calls.response.lengths > 0)
    detail = f"{with_ids} of {counted(answered, 'call')}"
    if with_ids == answered > 0:
        return good(what, detail)
    remedy = (
        "the model server must support return_token_ids: vLLM 0.10.2 or newer, SGLang, or this package's. Hosted models do not "
        "return token ids. Messages and Responses mostly lack them: with litellm (AGL_LITELLM) such calls are sent to chat/completions"
    )
    return wrong(what, detail, remedy, _defects(once, log_probs=False), spoils=("logprobs", "trajectories", "refused"))


def _logprobs(once: FinishedAttempt) -> Finding:
    calls = once.traces.calls
    what = "and log-probs"
    right, answered = _calls_with(calls, (calls.logprobs.lengths == calls.response.lengths) & (calls.response.lengths > 0))
    detail = f"{right} of {counted(answered, 'call')}"
    if right == answered > 0:
        return good(what, detail)
    remedy = (
        "the model server must return the log-probs of the distribution that it samples from: vLLM with --logprobs-mode processed_logprobs"
    )
    return wrong(what, detail, remedy, _defects(once, log_probs=True), spoils=("trajectories", "refused"))


def _defects(once: FinishedAttempt, *, log_probs: bool) -> list[str]:
    found = Counter(str(why) for span in _proxied(once) if (why := span.attributes.get(conventions.LLM_DEFECT)))
    return [f"{count} × {printable(why)} (docs/training-files.md)" for why, count in found.items() if ("logprobs" in why) == log_probs]


def _sampling(once: FinishedAttempt) -> Finding | None:
    """Advise on a temperature, which matters to training alone; what else an agent sets, and a temperature of 0, training refuses."""
    what, total = "it leaves the temperature to training", once.traces.calls.count
    requests = [span for span in _proxied(once) if not span.attributes.get(conventions.LLM_CHOICE)]
    found = [own for span in requests if (own := own_temperature_of(span.attributes)) is not None and own >= LEAST_TEMPERATURE]
    if not found:
        return good(what, "no model call sets it") if total else None
    values = ", ".join(f"{value:g}" for value in dict.fromkeys(found))
    detail = f"{len(found)} of {counted(total, 'call')} set{'s' if len(found) == 1 else ''} temperature {values}"
    if set(found) == {1.0}:
        return good(what, f"{detail}, the default of a run")
    remedy = (
        "GRPO scores such calls at their own temperature, verl refuses them. To sample at the run's, leave it out, or let GRPO replace it: "
        'sampling_policy = "enforce" (docs/training.md#sampling)'
    )
    return advice(what, detail, remedy)


def _sent(once: FinishedAttempt) -> Finding | None:
    """Advise on parameters that nobody sent: a training refuses such calls, but its own resource sends them."""
    rows = np.flatnonzero(_unsent(once)).tolist()
    if not rows:
        return None
    fields = dict.fromkeys(name for row in rows for name in unsent_of(once.traces.calls.contract[row]))
    what, remedy = "no sampling parameter is left to the model server", remedies.SAMPLING[UNSENT]
    detail = f"{len(rows)} of {counted(len(once.traces.calls), 'call')} left {', '.join(fields)} to it"
    return advice(what, detail, f"in a job nothing: its resource sends them. Else {remedy}")


def _unsent(once: FinishedAttempt) -> NDArray[np.bool_]:
    calls = once.traces.calls
    fields = unlike(calls, Assumed(1.0, temperatures="one")).fields
    return np.array([UNSENT in each for each in fields], np.bool_) & (calls.response.lengths > 0)


def _choices(once: FinishedAttempt) -> Finding | None:
    calls = once.traces.calls
    several = int(calls.several_choices.sum())
    return advice("each call asks for one choice", "not all", several_choices_warning(several, len(calls))) if several else None


def _reward(once: FinishedAttempt) -> Finding:
    what, spoils = "it has a reward", ("refused",)
    rewards = once.traces.rewards.get(_key(once), ())
    if _by_grader(once):
        return wrong(what, printable(once.rollout.attempt.error or ""), "correct the grader", spoils=("trajectories", "refused"))
    if (value := final_reward(rewards)) is not None:
        return good(what, f"{value:g}" + (", by the grader" if once.graded else ""))
    if any(reward.is_of(None) for reward in rewards):
        given = next(reward.value for reward in reversed(rewards) if reward.is_of(None))
        return wrong(what, f"{given:g}", "a reward is a finite number of at most 1e9 either way", spoils=spoils)
    if once.graded:
        return wrong(what, "none: the grader returned None", "return a number; attempts without a reward are not trained on", spoils=spoils)
    remedy = (
        "attempts without one are not trained on: check your grader here with --grader FILE.py:function, or emit one (agl_otel.emit_reward)"
    )
    return advice(what, "none yet", remedy)


def _stored(once: FinishedAttempt) -> Finding | None:
    what, verdict = STORED, once.traces.verdicts[_key(once)]
    reasons = [*verdict.reasons, *(f"note: {note}" for note in verdict.notes)]
    if verdict.kind == "empty":
        return None
    if verdict.kind == "complete":
        return good(what, verdict.kind, reasons)
    return wrong(what, verdict.kind, "a process that is killed, or ends by os._exit, loses its last spans", reasons, spoils=("refused",))


def _trajectories(once: FinishedAttempt) -> Finding | None:
    """Tell how calls are merged, whatever else is refused of the attempt."""
    what, calls = "its calls make one trajectory", once.traces.calls.count
    batch = to_trajectories(replace(once.traces, rewards={}), take=(*TAKEN_VERDICTS, "incomplete"), fill_reward=0.0)
    if len(batch) < 2:
        return good(what, counted(calls, "call")) if len(batch) else None
    why = sorted(batch.breaks.items())
    reasons = [f"{count} × {reason}: {SPLIT_REASONS[reason]}" for reason, count in why]
    remedy = "; ".join(dict.fromkeys(remedies.SPLIT[reason] for reason, _ in why))
    return advice(what, f"{counted(calls, 'call')} make {len(batch)}, each with the attempt's reward", remedy, reasons)


def _agents(once: FinishedAttempt) -> Finding | None:
    what, names = "its agents have names", Counter(once.traces.calls.agent)
    empty = [span for span in _own(once) if span.attributes.get("gen_ai.agent.name") == ""]
    if not empty and not (names[""] and len(names) > 1):
        return None
    detail = f"{names['']} of {counted(len(once.traces.calls), 'call')} {'has' if names[''] == 1 else 'have'} none"
    return advice(what, detail, "agent_match cannot tell them: give each agent a name, as in Agent(name=…)")


def _refused(once: FinishedAttempt) -> Finding | None:
    """Tell what training would refuse, as if a reward that is yet to come were there."""
    fill = None if once.traces.rewards.get(_key(once)) or once.graded else 0.0
    batch = to_trajectories(once.traces, fill_reward=fill, sampling=IN_A_JOB)
    what, known = "training takes its calls", {**ATTEMPT_REFUSALS, **CALL_REFUSALS}
    why = sorted(batch.refused.items())
    if not why:
        return good(what, "all, in a job" if _unsent(once).any() else "all")
    reasons = [f"{count} × {name}: {known[name]}" for name, count in why]
    reasons += [f"{count} × by {name}" for name, count in sorted(batch.differing.items())]
    remedy = "; ".join(dict.fromkeys(remedies.of(name, batch.differing) for name, _ in why))
    if not len(batch):
        return wrong(what, "none", remedy, reasons)
    return advice(what, f"{int(batch.calls.sum())} of {counted(once.traces.calls.count, 'call')}", remedy, reasons)


def _key(once: FinishedAttempt) -> tuple[str, str]:
    return once.rollout.rollout_id, once.rollout.attempt.attempt_id


def _own(once: FinishedAttempt) -> list[Span]:
    others = (conventions.SPAN_LLM, conventions.SPAN_SEAL)
    return [
        span
        for span in once.spans
        if conventions.PROCESS in span.attributes and span.name not in others and conventions.REWARD_GIVEN not in span.attributes
    ]


def _proxied(once: FinishedAttempt) -> list[Span]:
    return [span for span in once.spans if span.name == conventions.SPAN_LLM]


def _calls_in(spans: Sequence[Span]) -> int:
    """Count model calls; the choices of one call count once."""
    return len({(span.attributes.get(conventions.PROCESS), span.attributes.get(conventions.LLM_CALL, span.span_id)) for span in spans})


def _calls_with(calls: CallColumns, right: NDArray[np.bool_]) -> tuple[int, int]:
    """Count the calls that have an answer, as (those all of whose choices are `right`, all)."""
    call = np.cumsum(~calls.further_choice) - 1
    failed = np.array([why.startswith(UPSTREAM) for why in calls.incomplete], np.bool_)
    answered = np.bincount(call[failed], minlength=calls.count) == 0
    return int((answered & (np.bincount(call[~right], minlength=calls.count) == 0)).sum()), int(answered.sum())


CHECKS: Final[Sequence[Check[FinishedAttempt]]] = (
    Check("answers", _answers),
    Check("command", _command),
    Check("hook", _hook),
    Check("calls", _calls),
    Check("spans", _spans),
    Check("provider", _provider),
    Check("ids", _ids),
    Check("logprobs", _logprobs),
    Check("sampling", _sampling),
    Check("sent", _sent),
    Check("choices", _choices),
    Check("reward", _reward),
    Check("stored", _stored),
    Check("trajectories", _trajectories),
    Check("agents", _agents),
    Check("refused", _refused),
)
"""In the order in which things go wrong."""

// What the service answers under /v1/agl (see /v1/agl/openapi.json), and how it is asked.

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
export type Page<T> = { items: T[]; limit: number; offset: number; total: number; searched?: number };
export type Status = "queuing" | "preparing" | "running" | "failed" | "succeeded" | "cancelled" | "requeuing";
export type Run = {
  run_id: string; rollouts: number; by_status: Partial<Record<Status, number>>; by_mode: Record<string, number>;
  attempts: number; start_time: number; end_time: number | null; last_step: number | null;
};
export type Training = { run_id: string; algorithm: string; outcome: string; steps: number; last_step: number; last_version: string; promoted: number; start_time: number; end_time: number };
export type Cycle = {
  cycle: number; verdict: string; stage: string; stage_began: number | null; waits: string; reasons: { key: string; text: string; alarm: boolean }[]; start_time: number; end_time: number; resources_id: string;
  version_before: string; version_after: string; attempts: number; unlinked: number; selection: string; training_run: string; samples: number; trace_id: string; span_id: string;
  held_out_before: number | null; held_out_after: number | null; held_out_gain_low: number | null; held_out_gain_high: number | null; drift: number | null;
  backtest_gain: number | null; backtest_verdict: string; trusted_gain: number | null; trusted_verdict: string;
  canary_share: number | null; canary_begun: number | null; canary_rated: number | null; canary_mean: number | null; canary_promoted_mean: number | null; canary_promoted_rated: number | null;
};
export type PublishingStep = { run_id: string; algorithm: string; step: number; version_before: string; version_after: string; verdict: string };
export type CurvePoint = {
  step: number; mode: string; rollouts: number; ended: number; rewarded: number; reward_mean: number | null; reward_std: number | null;
  reward_min: number | null; reward_max: number | null; spans: number; errors: number; prompt_tokens: number; response_tokens: number; made: boolean;
};
export type Curve = { run: Run; by: "step" | "order"; points: CurvePoint[]; seconds_old: number };
export type StepLosses = {
  step: number; rollouts: number; samples: number; rollouts_without_sample: number; groups_gone: number; replies_cut: number;
  refused: Record<string, number>; lost: string; other_code: string;
};
export type Verdicts = { of: number; counts: Record<string, number>; alarms: number; missing: number; reasons: Record<string, number> };
export type Attempt = {
  rollout_id: string; attempt_id: string; sequence_id: number; start_time: number; end_time: number | null; status: string;
  worker_id: string | null; last_heartbeat_time: number | null; metadata: Json; error: string | null; seals: Record<string, number> | null;
};
export type Rollout = {
  rollout_id: string; input: Json; start_time: number; end_time: number | null; mode: string | null; resources_id: string | null;
  resources_version: number | null; status: Status; config: Json; metadata: { [key: string]: Json } | null; priority: number;
  labels: Record<string, string> | null; reason: string | null; attempt?: Attempt;
};
export type Verdict = { kind: string; missing: number; reasons: string[]; notes: string[]; alarm: boolean };
export type Figures = {
  rollout_id: string; attempt_id: string; verdict: Verdict; reward: number | null; rewards: Record<string, number>;
  spans: number; errors: number; calls: number; prompt_tokens: number; response_tokens: number; conversation_ids: string[]; notes: string[];
};
export type Evaluation = {
  attempt_id: string; span_id: string; response_id: string; id: string; time: number; name: string; value: number | null; label: string;
  text: string; correction: string; source: string; rubric: string; stored: string; words: string;
};
export type Output = { rollout_id: string; text: string };
export type OutlineSpan = {
  attempt_id: string; sequence_id: number; trace_id: string; span_id: string; parent_id: string; name: string; kind: string; service: string;
  status: string; message: string; start_nano: string; duration_nano: string; process: string; is_call: boolean; call: number; choice: number;
  model: string; response_id: string; within: string; model_version: string; agent: string; is_agent: boolean; operation: string; operation_name: string; tool: string; incomplete: string; sampling: string[]; unbridged: string; prompt_tokens: number; response_tokens: number;
  rewards: Record<string, number>; events: number;
};
export type Outline = { spans: OutlineSpan[]; total: number };
export type Span = {
  rollout_id: string; attempt_id: string; sequence_id: number; trace_id: string; span_id: string; parent_id: string | null; name: string;
  kind?: string; status: { status_code: string; description: string | null }; attributes: Record<string, Json>;
  events: { name: string; attributes: Record<string, Json>; timestamp: number | null }[]; links: Json[];
  resource: { attributes: Record<string, Json> }; start_time: number | null; end_time: number | null;
};
export type Call = {
  span_id: string; trace_id: string; attempt_id: string; name: string; agent: string; model: string; start_time: number; end_time: number;
  messages: Json[]; repeated: number; reply: Json[]; tools: Json[]; prompt_tokens: number | null; response_tokens: number | null;
  token_span_id: string; error: string;
};
export type Conversation = { calls: Call[]; total: number; spans_left_out: number };
export type Tokens = { prompt_token_ids: number[]; response_token_ids: number[]; logprobs: number[] | null };
export type Resources = { resources_id: string; create_time: number; update_time: number; version: number; resources: Record<string, { [key: string]: Json }> };
export type Worker = {
  worker_id: string; status: "idle" | "busy" | "unknown"; heartbeat_stats: { [key: string]: Json } | null; last_heartbeat_time: number | null;
  last_dequeue_time: number | null; last_busy_time: number | null; last_idle_time: number | null; current_rollout_id: string | null; current_attempt_id: string | null;
};
export type Rubric = { rubric: string; name: string; version: number; text: string; labels: { label: string; value: number | null }[] };
export type QueuedReview = { rollout_id: string; attempt_id: string; why: string };
export type ReviewQueue = { items: QueuedReview[]; total: number; reviewed: number; searched: number; ended: number };
export type Agreement = {
  reviewers: [string, string]; n: number; labels: string[]; counts: number[][]; observed: number | null; expected: number | null; kappa: number | null; undefined: string;
};
export type Agreements = { rubric: string; reviewers: { reviewer: string; reviews: number }[]; pairs: Agreement[] };
export type Answer = { columns: string[]; types: string[]; rows: Json[][]; truncated: boolean };
export type Statistics = {
  total_rollouts: number; total_attempts: number; total_spans: number; total_resources: number; total_workers: number; uptime: number;
  rollouts_by_status: Partial<Record<Status, number>>; claimable: number; oldest_claimable_age_seconds: number | null; name: string;
};

export class ApiError extends Error {
  constructor(readonly status: number, message: string) {
    super(message);
  }
}

const TOKEN = "agl-token";
export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (value: string) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

type Query = Record<string, string | number | undefined | readonly string[]>;

function address(path: string, query: Query): string {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (Array.isArray(value)) value.forEach((each: string) => parts.append(name, each));
    else if (value !== undefined && value !== "") parts.append(name, String(value));
  }
  const text = parts.toString();
  return `/v1/agl${path}${text ? `?${text}` : ""}`;
}

async function ask<T>(url: string, init: RequestInit): Promise<T> {
  const headers: Record<string, string> = { ...(init.headers as Record<string, string>) };
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  let answer: Response;
  try {
    answer = await fetch(url, { ...init, headers });
  } catch {
    throw new ApiError(0, "The service does not answer. Is `agl-otel up` running?");
  }
  const text = await answer.text();
  let body: unknown;
  try {
    body = JSON.parse(text);
  } catch {
    throw new ApiError(answer.status, `the service answered ${answer.status}: ${text.slice(0, 300)}`);
  }
  if (!answer.ok) throw new ApiError(answer.status, (body as { detail?: string }).detail ?? `the service answered ${answer.status}`);
  return body as T;
}

export const get = <T>(path: string, query: Query = {}, signal?: AbortSignal) => ask<T>(address(path, query), { signal });
export const post = <T>(path: string, body: unknown, signal?: AbortSignal) =>
  ask<T>(address(path, {}), { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal });
export const id = encodeURIComponent;

// A reviewer's answers on the way to the store: kept in this browser until they are acknowledged.
import { useState } from "react";
import { post, type QueuedReview, type Rubric } from "./api";

/** What a reviewer has written of an attempt; `failed` is what was sent and not acknowledged. */
export type Draft = { label?: string; text: string; correction: string; failed?: { id: string; body: string; why: string } };
export const EMPTY: Draft = { text: "", correction: "" };
const KEY = "agl-review-drafts";
const PATIENCE_MS = 30_000;

const newId = (): string => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

function kept(): Record<string, Draft> {
  try {
    return JSON.parse(localStorage.getItem(KEY) ?? "{}") as Record<string, Draft>;
  } catch {
    return {};
  }
}

function keep(drafts: Record<string, Draft>): void {
  try {
    localStorage.setItem(KEY, JSON.stringify(drafts));
  } catch { /* the browser keeps no more: the page still does */ }
}

/** The drafts of one reviewer under one rubric, by attempt, and how they are sent. */
export function useReviews(reviewer: string, rubric: Rubric | undefined) {
  const [drafts, setDrafts] = useState(kept);
  const [done, setDone] = useState<Record<string, Draft>>({});
  const [sending, setSending] = useState(false);
  const key = (item: QueuedReview) => [reviewer, rubric?.rubric, item.rollout_id, item.attempt_id].join("\n");
  const put = (item: QueuedReview, draft: Draft | undefined) => setDrafts((before) => {
    const { [key(item)]: _, ...rest } = before;
    const next = draft ? { ...rest, [key(item)]: draft } : rest;
    keep(next);
    return next;
  });
  const of = (item: QueuedReview): Draft => drafts[key(item)] ?? done[key(item)] ?? EMPTY;

  /** Send a review; whether it is stored. What is sent again unchanged has the same id, so that it is stored once. */
  async function send(item: QueuedReview, label: string): Promise<boolean> {
    const { failed, ...draft } = { ...of(item), label };
    const value = rubric?.labels.find((each) => each.label === label)?.value ?? undefined;
    const given = { rollout_id: item.rollout_id, attempt_id: item.attempt_id, source: reviewer, rubric: rubric?.rubric, label, value, text: draft.text, correction: draft.correction };
    const body = JSON.stringify(given);
    const id = failed?.body === body ? failed.id : newId();
    setSending(true);
    try {
      await post("/feedback", { ...given, id }, AbortSignal.timeout(PATIENCE_MS));
    } catch (error) {
      put(item, { ...draft, failed: { id, body, why: error instanceof Error ? error.message : String(error) } });
      return false;
    } finally {
      setSending(false);
    }
    put(item, undefined);
    setDone((before) => ({ ...before, [key(item)]: draft }));
    return true;
  }
  return { of, put, send, sending, isDone: (item: QueuedReview) => key(item) in done };
}

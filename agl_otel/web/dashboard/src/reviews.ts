// A reviewer's answers on the way to the store: kept in this browser until they are acknowledged.
import { useEffect, useState } from "react";
import { post, type QueuedReview, type Rubric } from "./api";

/** What a reviewer has written of an attempt; `failed` is what was sent and not acknowledged. */
export type Draft = { label?: string; text: string; correction: string; failed?: { id: string; body: string; why: string } };
export const EMPTY: Draft = { text: "", correction: "" };
const KEY = "agl-review-draft\n"; // and whose: each draft is kept by itself, so that tabs do not overwrite what others keep
const PATIENCE_MS = 30_000;

const newId = (): string => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

function read(text: string | null): Draft | undefined {
  try {
    return JSON.parse(text ?? "") as Draft;
  } catch {
    return undefined;
  }
}

function kept(): Record<string, Draft> {
  try {
    const found = Object.keys(localStorage).filter((each) => each.startsWith(KEY)).map((each) => [each.slice(KEY.length), read(localStorage.getItem(each))]);
    return Object.fromEntries(found.filter(([, draft]) => draft)) as Record<string, Draft>;
  } catch {
    return {};
  }
}

function keep(key: string, draft: Draft | undefined): void {
  try {
    if (draft) localStorage.setItem(KEY + key, JSON.stringify(draft));
    else localStorage.removeItem(KEY + key);
  } catch { /* the browser keeps no more: the page still does */ }
}

function changed(drafts: Record<string, Draft>, key: string, draft: Draft | undefined): Record<string, Draft> {
  const { [key]: _, ...rest } = drafts;
  return draft ? { ...rest, [key]: draft } : rest;
}

/** The drafts of one reviewer under one rubric, by attempt, and how they are sent. */
export function useReviews(reviewer: string, rubric: Rubric | undefined) {
  const [drafts, setDrafts] = useState(kept);
  const [done, setDone] = useState<Record<string, Draft>>({});
  const [sending, setSending] = useState(false);
  const key = (item: QueuedReview) => [reviewer, rubric?.rubric, item.rollout_id, item.attempt_id].join("\n");
  const put = (item: QueuedReview, draft: Draft | undefined) => {
    keep(key(item), draft);
    setDrafts((before) => changed(before, key(item), draft));
  };
  useEffect(() => { // what is written in another tab is shown in this one: both go on from the same text
    const listen = ({ key: name, newValue }: StorageEvent) => { if (name?.startsWith(KEY)) setDrafts((before) => changed(before, name.slice(KEY.length), read(newValue))); };
    window.addEventListener("storage", listen);
    return () => window.removeEventListener("storage", listen);
  }, []);
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

// Review: one attempt after the other, its conversation at the left, the rubric at the right. All of it by keyboard.
import { useInfiniteQuery, useQuery, useQueryClient } from "@tanstack/react-query";
import { useEffect, useRef, useState } from "react";
import { useSearchParams } from "react-router";
import { get, type QueuedReview, type ReviewQueue, type Rubric } from "../api";
import { Empty, Head, Problem, RolloutLink } from "../parts/common";
import { Conversation, conversationQuery } from "../parts/conversation";
import { Agreement, Help, Labels, RubricForm } from "../parts/review";
import { useReviews } from "../reviews";
import { change, useSettings } from "../settings";
import { number, visible } from "../text";

const RULES = [["random", "At random"], ["selected", "As selected"], ["disagreeing", "Judges disagree"], ["low_logprob", "Low log-prob"], ["refused", "Refused by training"]] as const;
const TYPED = "input, textarea, select, dialog[open]";

export function Review() {
  const { reviewer } = useSettings();
  const [search, setSearch] = useSearchParams();
  const set = (name: string, value: string) => setSearch((before) => { if (value) before.set(name, value); else before.delete(name); return before; }, { replace: true });
  const rubrics = useQuery({ queryKey: ["rubrics"], queryFn: ({ signal }) => get<Rubric[]>("/reviews/rubrics", {}, signal) });
  const rubric = rubrics.data?.find((each) => each.name === search.get("rubric")) ?? rubrics.data?.[0];
  const selection = search.get("selection") ?? "";
  const asked = { rule: search.get("rule") ?? (selection ? "selected" : "random"), run: search.get("run") ?? "", selection, rubric: rubric?.rubric, reviewer };
  const queue = useQuery({
    queryKey: ["review-queue", asked], enabled: !!reviewer && !!rubric, staleTime: Infinity, gcTime: 0,
    queryFn: ({ signal }) => get<ReviewQueue>("/reviews/queue", asked, signal),
  });
  return (
    <>
      <Head title="Review"><span className="count" title="Not reviewed by you, of the rollouts that were searched">{queue.data && `${number(queue.data.total)} of ${number(queue.data.searched)} searched`}</span></Head>
      <div className="filters">
        <label className="dim small">you <Entered label="Your name" hint="Your name" value={reviewer} enter={(next) => change({ reviewer: next })} /></label>
        <label className="dim small">rule <select aria-label="Rule" value={asked.rule} onChange={(event) => set("rule", event.target.value)}>{RULES.map(([rule, title]) => <option key={rule} value={rule}>{title}</option>)}</select></label>
        <label className="dim small">rubric <select aria-label="Rubric" value={rubric?.name ?? ""} onChange={(event) => set("rubric", event.target.value)}>{rubrics.data?.map((each) => <option key={each.name} value={each.name}>{visible(each.rubric)}</option>)}</select></label>
        <label className="dim small">run <Entered label="Run" hint="every run" value={asked.run} enter={(next) => set("run", next)} /></label>
        <label className="dim small">selection <Entered label="Selection" hint="none" value={selection} enter={(next) => set("selection", next)} /></label>
      </div>
      <Problem error={rubrics.error ?? queue.error} />
      {rubrics.data?.length === 0 && <section className="card form"><h2>Write the first rubric</h2><RubricForm onStored={(stored) => set("rubric", stored.name)} /></section>}
      {rubric && !reviewer && <Empty>Write your name above: it stands with your reviews.</Empty>}
      {rubric && queue.isFetching && <div className="wait" />}
      {rubric && queue.data && <Items key={JSON.stringify(asked)} queue={queue.data} rubric={rubric} reviewer={reviewer} choose={(name) => set("rubric", name)} />}
    </>
  );
}

/** A field that counts when it is left, or by Enter: half a name is nobody's. */
function Entered({ label, hint, value, enter }: { label: string; hint: string; value: string; enter: (value: string) => void }) {
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  return <input aria-label={label} placeholder={hint} maxLength={500} value={text} onChange={(event) => setText(event.target.value)} onBlur={() => enter(text.trim())}
    onKeyDown={(event) => { if (event.key === "Enter" || event.key === "Escape") event.currentTarget.blur(); }} />;
}

function Items({ queue, rubric, reviewer, choose }: { queue: ReviewQueue; rubric: Rubric; reviewer: string; choose: (rubric: string) => void }) {
  const { of, put, send, sending, isDone } = useReviews(reviewer, rubric);
  const { tokens } = useSettings();
  const client = useQueryClient();
  const [at, setAt] = useState(() => Math.max(0, queue.items.findIndex((each) => of(each).failed))); // first what was not stored
  const [before, setBefore] = useState<number[]>([]);
  const [said, setSaid] = useState("");
  const [help, setHelp] = useState(false);
  const talk = useRef<HTMLDivElement>(null), comment = useRef<HTMLTextAreaElement>(null), correction = useRef<HTMLTextAreaElement>(null);
  const item: QueuedReview | undefined = queue.items[at];
  const next = (from: number) => queue.items.findIndex((each, place) => place > from && !isDone(each));
  const { data: read } = useInfiniteQuery({ ...conversationQuery(item?.rollout_id ?? "", item?.attempt_id ?? ""), enabled: !!item, staleTime: 60_000 });
  const ahead = queue.items[next(at)];
  useEffect(() => { if (read && ahead) void client.prefetchInfiniteQuery({ ...conversationQuery(ahead.rollout_id, ahead.attempt_id), staleTime: 60_000 }); }, [read, ahead]);

  const move = (to: number, why = "") => {
    setAt(to);
    setSaid(why);
    talk.current?.focus({ preventScroll: true });
    talk.current?.scrollTo(0, 0);
    talk.current?.scrollIntoView({ block: "start" });
  };
  const step = (by: number) => { const to = at + by; if (to >= 0 && to <= queue.items.length) move(to); };
  const undo = () => { const last = before.at(-1); if (last === undefined) return setSaid("There is nothing to undo."); setBefore(before.slice(0, -1)); move(last, "Answer again: your later answer counts."); };
  async function answer(label: string | undefined) {
    if (!item || !label || sending || !read) return;
    setSaid("Storing …");
    if (!await send(item, label)) return setSaid("");
    setBefore([...before, at]);
    const following = next(at);
    move(following >= 0 ? following : queue.items.length, `Stored: ${visible(label)}.`);
  }

  const keys = useRef((_: KeyboardEvent) => {});
  keys.current = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target instanceof Element && event.target.closest(TYPED)) {
      if (event.key === "Escape" && event.target.closest("textarea, select")) talk.current?.focus({ preventScroll: true });
      return;
    }
    const act = { j: () => step(1), k: () => step(-1), u: undo, c: () => comment.current?.focus(), e: () => correction.current?.focus(), t: () => change({ tokens: !tokens }), r: () => void answer(item && of(item).failed && of(item).label), "?": () => setHelp(true) }[event.key]
      ?? (/^[1-9]$/.test(event.key) ? () => void answer(rubric.labels[Number(event.key) - 1]?.label) : undefined);
    if (!act || sending) return;
    event.preventDefault();
    act();
  };
  useEffect(() => {
    const listen = (event: KeyboardEvent) => keys.current(event);
    window.addEventListener("keydown", listen);
    return () => window.removeEventListener("keydown", listen);
  }, []);

  const draft = item && of(item);
  const write = (part: { text: string } | { correction: string }) => item && draft && put(item, { ...draft, ...part });
  return (
    <div className="review">
      <div className="review-talk" tabIndex={0} ref={talk} role="region" aria-label="Conversation">
        {item ? <Conversation key={item.attempt_id} rolloutId={item.rollout_id} attemptId={item.attempt_id} live={false} tokens={tokens} />
          : <Empty>{queue.items.length ? "That was the last one. Load the page again for more, k goes back." : "Nothing is left to review by this rule."}</Empty>}
      </div>
      <aside className="panel" aria-label="Rubric">
        <div className="line"><h2>{visible(rubric.rubric)}</h2>
          <span className="count">{number(Math.min(at + 1, queue.items.length))} of {number(queue.items.length)} · {number(queue.reviewed + queue.items.filter(isDone).length)} reviewed</span></div>
        {item && <p className="small"><RolloutLink id={item.rollout_id} />{item.why && <span className="warn"> {visible(item.why)}</span>}</p>}
        <p className="text">{visible(rubric.text.split("\n").filter((line) => !line.includes("=")).join("\n").trim())}</p>
        {item && draft && <>
          <label className="field">Comment <kbd>c</kbd><textarea ref={comment} rows={2} aria-keyshortcuts="c" value={draft.text} onChange={(event) => write({ text: event.target.value })} /></label>
          <label className="field">What it should have answered <kbd>e</kbd><textarea ref={correction} rows={3} aria-keyshortcuts="e" value={draft.correction} onChange={(event) => write({ correction: event.target.value })} /></label>
        </>}
        <Agreement rubric={rubric.rubric} />
        <details><summary>Change the rubric, or write another</summary><RubricForm rubric={rubric} onStored={(stored) => choose(stored.name)} /></details>
      </aside>
      <footer className="judge">
        {draft?.failed && <p className="problem" role="alert">Not stored: {visible(draft.failed.why)} <button onClick={() => void answer(draft.label)}>Send again <kbd>r</kbd></button></p>}
        {item && draft && <Labels rubric={rubric} chosen={draft.label} disabled={sending || !read} choose={(label) => void answer(label)} />}
        <div className="line">
          <button disabled={at === 0 || sending} onClick={() => step(-1)} aria-keyshortcuts="k">Back <kbd>k</kbd></button>
          <button disabled={!item || sending} onClick={() => step(1)} aria-keyshortcuts="j">Next <kbd>j</kbd></button>
          <button disabled={!before.length || sending} onClick={undo} aria-keyshortcuts="u">Undo <kbd>u</kbd></button>
          <button aria-pressed={tokens} onClick={() => change({ tokens: !tokens })} aria-keyshortcuts="t">Tokens <kbd>t</kbd></button>
          <button onClick={() => setHelp(true)} aria-keyshortcuts="?">Keys <kbd>?</kbd></button>
          <span role="status" className="dim small">{said}</span>
        </div>
      </footer>
      {help && <Help rubric={rubric} close={() => setHelp(false)} />}
    </div>
  );
}

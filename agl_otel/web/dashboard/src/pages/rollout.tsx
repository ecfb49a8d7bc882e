// One rollout: its attempts, and the spans of one of them as waterfall, tree, conversation and table.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { Link, useParams, useSearchParams } from "react-router";
import { get, id, type Attempt, type Evaluation, type Figures, type Outline, type OutlineSpan, type Page, type Rollout as RolloutType } from "../api";
import { Badge, Chips, Empty, Head, Json, Problem, Stat, Tabs, Text, useNarrow, useNow } from "../parts/common";
import { Conversation } from "../parts/conversation";
import { SpanPanel } from "../parts/span";
import { arrange, SEAL, type Node } from "../parts/spans";
import { Table, type Column } from "../parts/table";
import { useSettings } from "../settings";
import { ago, brief, duration, figure, number, oneLine, short, visible, when } from "../text";
import { Reward } from "./rollouts";

const VIEWS = [["waterfall", "Waterfall"], ["tree", "Tree"], ["conversation", "Conversation"], ["json", "JSON"]] as const;
type View = (typeof VIEWS)[number][0];
const LIMIT = 5000;

export function Rollout() {
  const { rolloutId = "" } = useParams();
  const [search, setSearch] = useSearchParams();
  const { refreshMs } = useSettings();
  const now = useNow();
  const path = `/rollouts/${id(rolloutId)}`;
  const rollout = useQuery({ queryKey: ["rollout", rolloutId], queryFn: ({ signal }) => get<RolloutType>(path, {}, signal), refetchInterval: (query) => (refreshMs && !query.state.data?.end_time ? refreshMs : false) });
  const going = !rollout.data?.end_time;
  const again = refreshMs && going ? refreshMs : false;
  const attempts = useQuery({ queryKey: ["attempts", rolloutId], queryFn: ({ signal }) => get<Page<Attempt>>(`${path}/attempts`, {}, signal), refetchInterval: again });
  const figures = useQuery({ queryKey: ["attempt-figures", rolloutId], queryFn: ({ signal }) => get<Figures[]>(`${path}/figures`, {}, signal), refetchInterval: again });
  const evaluations = useQuery({ queryKey: ["evaluations", rolloutId], queryFn: ({ signal }) => get<Evaluation[]>(`${path}/evaluations`, {}, signal), refetchInterval: again });
  const attemptId = search.get("attempt") ?? rollout.data?.attempt?.attempt_id ?? attempts.data?.items.at(-1)?.attempt_id;
  const attempt = attempts.data?.items.find((each) => each.attempt_id === attemptId);
  const found = figures.data?.find((each) => each.attempt_id === attemptId);
  const view = (search.get("view") ?? "waterfall") as View;
  const span = search.get("span") ?? "";
  const set = (name: string, value: string) => { const next = new URLSearchParams(search); if (value) next.set(name, value); else next.delete(name); if (name === "attempt") { next.delete("span"); next.delete("from"); } setSearch(next, { replace: name !== "view" }); };
  const from = Math.max(0, Number(search.get("from")) || 0);
  const outline = useQuery({ queryKey: ["outline", rolloutId, attemptId, from], placeholderData: keepPreviousData, enabled: attemptId !== undefined, refetchInterval: again, queryFn: ({ signal }) => get<Outline>(`${path}/outline`, { attempt_id: attemptId, limit: LIMIT, offset: from }, signal) });
  const data = rollout.data;
  const seals = search.get("seals") === "shown";
  const shown = useMemo(() => (outline.data?.spans ?? []).filter((each) => seals || each.name !== SEAL), [outline.data, seals]);
  return (
    <>
      <Head trail={<Link to="/rollouts">Rollouts</Link>} title={<span> / <span className="mono">{visible(rolloutId)}</span></span>}>
        {data && <Badge kind={data.status} />}
        {found && data?.end_time && <Badge kind={found.verdict.kind} title={found.verdict.reasons.join("\n") || undefined} />}
      </Head>
      <Problem error={rollout.error ?? attempts.error ?? outline.error ?? figures.error ?? evaluations.error} />
      {data && (
        <>
          <div className="stats">
            <Stat name="Reward" sub={found && Object.keys(found.rewards).length > 1 ? Object.entries(found.rewards).map(([name, value]) => `${visible(name)} ${figure(value)}`).join(" · ") : undefined}><Reward value={found?.reward} /></Stat>
            <Stat name="Duration" sub={<span title={when(data.start_time)}>queued {ago(data.start_time, now)}</span>}>{attempt ? duration((attempt.end_time ?? data.end_time ?? now) - attempt.start_time) : "–"}</Stat>
            <Stat name="Model calls" sub={found ? found.calls ? `${short(found.prompt_tokens)} + ${short(found.response_tokens)} tokens` : "none by the proxy" : undefined}>{number(found?.calls)}</Stat>
            <Stat name="Spans" sub={found?.errors ? <span className="bad">{number(found.errors)} with errors</span> : "no errors"}>{number(found?.spans)}</Stat>
            <Stat name="Mode" sub={data.resources_id ? <Link className="mono" to={`/resources/${id(data.resources_id)}${data.resources_version ? `?version=${data.resources_version}` : ""}`}>{visible(data.resources_id)} v{data.resources_version}</Link> : "no resources"}>{data.mode ?? "–"}</Stat>
            <div className="stat wide"><span className="name">Input</span><Text text={brief(data.input, 3000)} height={150} /></div>
          </div>
          {(data.reason || attempt?.error) && <p className="problem">{visible(data.reason ?? attempt?.error ?? "")}</p>}
          {found && found.verdict.kind !== "complete" && data.end_time && found.verdict.reasons.length > 0 && <p className="note">Verdict {found.verdict.kind}: {found.verdict.reasons.map(visible).join("; ")}</p>}
          {found && data.end_time && found.verdict.notes.length > 0 && <p className="small dim">{found.verdict.notes.map(visible).join("; ")}</p>}
          {found && found.notes.length > 0 && <p className="note">{found.notes.map(visible).join("; ")}</p>}
          {found && found.conversation_ids.length > 0 && <p className="small dim" title={found.conversation_ids.map(visible).join("\n")}>conversation {oneLine(found.conversation_ids.join(", "), 300)}</p>}
          <Feedback evaluations={evaluations.data?.filter((each) => each.attempt_id === attemptId) ?? []} spans={outline.data?.spans ?? []} choose={(next) => set("span", next)} />
          <div className="line bar-line">
            <Tabs names={VIEWS} chosen={view} choose={(next) => set("view", next)} />
            <label className="dim small">attempt <select aria-label="Attempt" value={attemptId ?? ""} onChange={(event) => set("attempt", event.target.value)}>
              {attempts.data?.items.map((each) => <option key={each.attempt_id} value={each.attempt_id}>#{each.sequence_id} {each.status}</option>)}</select></label>
            {(view === "waterfall" || view === "tree") && <Chips names={["seals"]} chosen={seals ? ["seals"] : []} choose={(names) => set("seals", names.length ? "shown" : "")} />}
            {attempt && <span className="dim small">{visible(attempt.attempt_id)} · worker {visible(attempt.worker_id ?? "–")} · heartbeat {ago(attempt.last_heartbeat_time, now)}</span>}
            {outline.data && (from > 0 || outline.data.total > outline.data.spans.length) && view !== "conversation" && (
              <span className="warn small">spans {number(from + 1)} to {number(from + outline.data.spans.length)} of {number(outline.data.total)}{" "}
                <button disabled={from === 0} onClick={() => set("from", from > LIMIT ? String(from - LIMIT) : "")}>earlier</button>{" "}
                <button disabled={from + outline.data.spans.length >= outline.data.total} onClick={() => set("from", String(from + LIMIT))}>later</button>
              </span>
            )}
          </div>
          {view === "json" ? <div className="scroll"><Json value={{ ...data, attempts: attempts.data?.items, figures: figures.data }} height={100000} /></div>
            : view === "conversation" ? (attemptId ? <Conversation rolloutId={rolloutId} attemptId={attemptId} live={again} /> : <Empty>No attempt yet.</Empty>)
            : (
              <div className={span ? "split panelled" : "split none"}>
                {outline.data ? <Spans spans={shown} view={view} chosen={span} choose={(next) => set("span", next === span ? "" : next)} />
                  : attemptId === undefined && attempts.data ? <Empty>No attempt yet.</Empty> : <div className="wait" />}
                {span && <SpanPanel rolloutId={rolloutId} attemptId={attemptId ?? ""} spanId={span} proxyId={outline.data?.spans.find((each) => each.within === span)?.span_id} close={() => set("span", "")} />}
              </div>
            )}
        </>
      )}
    </>
  );
}

// What was said of the attempt afterwards, each with a way to the call or span that it is about.
function Feedback({ evaluations, spans, choose }: { evaluations: Evaluation[]; spans: OutlineSpan[]; choose: (spanId: string) => void }) {
  const spanOf = (each: Evaluation) => spans.find((span) => (each.span_id ? span.span_id === each.span_id : each.response_id && span.response_id === each.response_id));
  return (
    <>
      {evaluations.map((each, place) => {
        const span = spanOf(each);
        return <div key={place} className="note feedback" title={when(each.time)}><Text text={each.words} height={80} />{span && <button className="plain" onClick={() => choose(span.within || span.span_id)}>on {oneLine(span.name, 60)}</button>}</div>;
      })}
    </>
  );
}

function Spans({ spans, view, chosen, choose }: { spans: OutlineSpan[]; view: "waterfall" | "tree"; chosen: string; choose: (spanId: string) => void }) {
  const [folded, setFolded] = useState<ReadonlySet<string>>(new Set());
  const narrow = useNarrow();
  const { rows, start, end, deepest } = useMemo(() => arrange(spans, folded), [spans, folded]);
  const whole = Math.max(end - start, 1);
  const indent = Math.min(14, (narrow ? 40 : chosen ? 70 : 130) / Math.max(deepest, 1)); // of a level: the deepest name needs room, too
  const fold = (key: string) => setFolded((before) => { const next = new Set(before); if (!next.delete(key)) next.add(key); return next; });
  const name: Column<Node> = {
    key: "name", title: `Span (${number(spans.length)})`, width: view === "waterfall" ? narrow ? "minmax(190px, 1.2fr)" : "minmax(170px, 1fr)" : "minmax(210px, 2fr)",
    cell: ({ span, proxy, depth, children }) => (
      <span className="spanname" style={{ paddingLeft: depth * indent }}>
        {children ? <button className="fold" aria-expanded={!folded.has(span.span_id)} aria-label="Children" onClick={() => fold(span.span_id)}>{folded.has(span.span_id) ? "▸" : "▾"}</button> : <i className="leaf" />}
        <i className={`dot kind ${kindOf(span)}`} />
        <span className={span.status === "Error" ? "bad" : ""} title={`${oneLine(span.name, 400)}\nlevel ${depth}`}>{oneLine(span.name, 120)}</span>
        {[span.operation_name, span.tool, span.model].map((other) => other && !span.name.includes(other) && <span key={other} className="dim">{oneLine(other, 60)}</span>)}
        {proxy && <span className="dim" title={`with the proxy's span ${proxy.span_id}: call ${proxy.call}`}>+ proxy</span>}
        {folded.has(span.span_id) && <span className="dim">+{children}</span>}
        {view === "tree" && span.agent && !span.name.includes(span.agent) && <span className="tag">{oneLine(span.agent, 40)}</span>}
        {view === "tree" && span.message && <span className="bad">{oneLine(span.message, 120)}</span>}
      </span>
    ),
  };
  const kinds = useMemo(() => [...new Set(spans.map(kindOf))], [spans]);
  const tokens: Column<Node> = { key: "tokens", title: "Tokens", width: "92px", right: true, wide: true, cell: ({ span, proxy = span }) => proxy.response_tokens ? <span className="dim" title="read + written">{short(proxy.prompt_tokens)} + {short(proxy.response_tokens)}</span> : null };
  const rewards: Column<Node> = { key: "reward", title: "Reward", width: "64px", right: true, wide: view === "waterfall", cell: ({ span }) => Object.entries(span.rewards).slice(0, 1).map(([key, value]) => <span key={key} title={Object.entries(span.rewards).map(([each, one]) => `${visible(each)} = ${figure(one)}`).join("\n")}><Reward value={value} /></span>) };
  const bar: Column<Node> = {
    key: "bar", title: <Kinds of={kinds} />, width: narrow ? "minmax(110px, 1fr)" : "minmax(110px, 1.5fr)",
    cell: ({ span, from, length }) => {
      const left = Math.max(0, ((from - start) / whole) * 100), width = (length / whole) * 100;
      const inside = left + width > 82 && left < 16;
      return (
        <span className="lane">
          <i className={`span kind ${kindOf(span)} ${span.status === "Error" ? "error" : ""}`} style={{ left: `${left}%`, width: `max(${Math.max(width, 0)}%, 2px)` }} />
          <em className={inside ? "in" : ""} style={inside ? { left: `${left}%` } : left + width > 82 ? { right: `${100 - left}%` } : { left: `${left + width}%` }}>{length ? duration(length / 1e9) : ""}</em>
        </span>
      );
    },
  };
  const more: Column<Node>[] = [
    { key: "duration", title: "Duration", width: "84px", right: true, cell: ({ length }) => duration(length / 1e9) },
    { key: "at", title: "At", width: "84px", right: true, wide: true, cell: ({ from }) => <span className="dim">{from < start ? "−" : "+"}{duration(Math.abs(from - start) / 1e9)}</span> },
    { key: "service", title: "Service", width: "minmax(80px, 0.5fr)", wide: true, cell: ({ span }) => <span className="dim">{oneLine(span.service, 60)}</span> },
    { key: "weights", title: "Weights", width: "70px", right: true, wide: true, cell: ({ span, proxy = span }) => proxy.model_version ? <span className="dim">v{oneLine(proxy.model_version, 20)}</span> : null },
    { key: "sampling", title: "Sampling", width: "minmax(80px, 0.5fr)", wide: true, cell: ({ span, proxy = span }) => <span className="dim" title={sampled(proxy)}>{oneLine(sampled(proxy), 80)}</span> },
    { key: "seq", title: "Seq.", width: "52px", right: true, wide: true, cell: ({ span }) => <span className="dim">{span.sequence_id}</span> },
  ];
  const columns = view === "waterfall" ? [name, bar, tokens, rewards] : [name, tokens, rewards, ...more];
  return <Table label="Spans" columns={columns} count={rows.length} row={(index) => rows[index]} rowHeight={26} onOpen={({ span }) => choose(span.span_id)} chosen={({ span }) => span.span_id === chosen}
    empty={<Empty>No spans of this attempt are stored.</Empty>} />;
}

const KINDS = { agent: "agent", model: "model", tool: "tool", reward: "reward", other: "other", ours: "agl-otel" } as const;
type Kind = keyof typeof KINDS;

const Kinds = ({ of }: { of: Kind[] }) => (
  <span className="legend">{(Object.keys(KINDS) as Kind[]).filter((kind) => of.includes(kind)).map((kind) => <span key={kind}><i className={`kind ${kind}`} />{KINDS[kind]}</span>)}</span>
);

const sampled = (span: OutlineSpan): string => [...span.sampling, ...(span.unbridged ? [`not bridged: ${span.unbridged}`] : [])].join("; ");

const kindOf = (span: OutlineSpan): Kind =>
  Object.keys(span.rewards).length ? "reward" : span.is_call ? "model" : span.is_agent ? "agent" : span.tool ? "tool" : span.model ? "model" : span.agent ? "agent" : span.name.startsWith("agentlightning.") ? "ours" : "other";

// Rollouts: filters and search in the address, pages fetched as they are scrolled to, attempts below.
import { keepPreviousData, useQueries, useQuery } from "@tanstack/react-query";
import { useCallback, useMemo, useState } from "react";
import { Link, useNavigate, useSearchParams } from "react-router";
import { get, id, post, type Attempt, type Figures, type Output, type Page, type Rollout } from "../api";
import { Badge, Chips, Empty, Head, Problem, RolloutLink, Short, STATUS_ORDER, Took, useLater, useNow } from "../parts/common";
import { Table, type Column, type Sort } from "../parts/table";
import { useSettings } from "../settings";
import { ago, duration, figure, number, short, visible, when } from "../text";

const PAGE = 100;
const MODES = ["train", "val", "test", "production"] as const;

export function Rollouts() {
  const [search, setSearch] = useSearchParams();
  const { refreshMs } = useSettings();
  const now = useNow();
  const go = useNavigate();
  const status = search.getAll("status"), mode = search.getAll("mode");
  const run = search.get("run") ?? undefined;
  const [text, setText] = useState(search.get("q") ?? "");
  const wanted = useLater(text.trim());
  const [input, setInput] = useState(search.get("input") ?? ""), [output, setOutput] = useState(search.get("output") ?? "");
  const asked = useLater(input.trim()), replied = useLater(output.trim(), 400); // every letter would read the replies of thousands
  const attempts = search.get("attempts") ?? "";
  const sort: Sort = { by: search.get("sort") ?? "", desc: search.get("order") !== "asc" };
  const [range, setRange] = useState<[number, number]>([0, 0]);
  const [unfolded, setUnfolded] = useState<ReadonlySet<string>>(new Set());
  const filter = useMemo(() => ({ status_in: status, mode_in: mode, run, rollout_id_contains: wanted || undefined, input_contains: asked || undefined,
    output_contains: replied || undefined, attempts_from: attempts || undefined, sort_by: sort.by || undefined, sort_order: sort.desc ? "desc" : "asc" }),
    [status.join(), mode.join(), run, wanted, asked, replied, attempts, sort.by, sort.desc]);

  const first = Math.floor(range[0] / PAGE), last = Math.floor(range[1] / PAGE);
  const numbers = Array.from({ length: Math.min(last - first, 3) + 1 }, (_, n) => first + n);
  const pages = useQueries({
    queries: [...new Set([0, ...numbers])].map((page) => ({
      queryKey: ["rollouts", filter, page],
      queryFn: ({ signal }: { signal: AbortSignal }) => get<Page<Rollout>>("/rollouts", { ...filter, limit: PAGE, offset: page * PAGE }, signal),
      refetchInterval: (refreshMs || false) as number | false,
      placeholderData: keepPreviousData<Page<Rollout>>,
    })),
    combine: (results) => ({ results, byPage: new Map([...new Set([0, ...numbers])].map((page, place) => [page, results[place]!.data])) }),
  });
  const total = pages.byPage.get(0)?.total ?? 0;
  const searched = pages.byPage.get(0)?.searched;
  const error = pages.results.find((result) => result.error)?.error;
  const row = (index: number) => pages.byPage.get(Math.floor(index / PAGE))?.items[index % PAGE];

  // Verdicts, rewards and tokens come from the spans: a second request, for what is seen only.
  const seen = useLater(range, 120);
  const ids = useMemo(() => {
    const found: string[] = [];
    for (let index = seen[0]; index <= seen[1]; index++) { const each = row(index); if (each?.attempt) found.push(each.rollout_id); }
    return found;
  }, [seen[0], seen[1], pages.results.map((result) => result.dataUpdatedAt).join()]);
  const figures = useQuery({
    queryKey: ["figures", ids], enabled: ids.length > 0, placeholderData: keepPreviousData,
    queryFn: async ({ signal }) => new Map((await post<Figures[]>("/rollouts/figures", { rollout_ids: ids }, signal)).map((each) => [each.rollout_id, each])),
  });
  const outputs = useQuery({
    queryKey: ["outputs", ids], enabled: ids.length > 0, placeholderData: keepPreviousData,
    queryFn: async ({ signal }) => new Map((await post<Output[]>("/rollouts/outputs", { rollout_ids: ids }, signal)).map((each) => [each.rollout_id, each.text])),
  });
  function set(name: string, values: string[]) {
    const next = new URLSearchParams(search);
    next.delete(name);
    values.filter(Boolean).forEach((value) => next.append(name, value));
    setSearch(next, { replace: true });
  }
  const onRange = useCallback((from: number, to: number) => setRange([from, to]), []);

  const columns = useMemo(() => columnsOf(figures.data, outputs.data, unfolded, setUnfolded, now), [figures.data, outputs.data, unfolded, now]);
  return (
    <>
      <Head title="Rollouts" trail={null}>
        <span className="count">{number(total)}</span>
        <input type="search" placeholder="Search by id" aria-label="Search by id" value={text} onChange={(event) => setText(event.target.value)} />
        <input type="search" placeholder="Input has" aria-label="Input has" maxLength={200} value={input} onChange={(event) => setInput(event.target.value)} />
        <input type="search" placeholder="Output has" aria-label="Output has" maxLength={200} value={output} onChange={(event) => setOutput(event.target.value)} />
      </Head>
      <div className="filters">
        <Chips names={STATUS_ORDER} chosen={status} choose={(names) => set("status", names)} />
        <span className="bar" />
        <Chips names={MODES} chosen={mode} choose={(names) => set("mode", names)} />
        <span className="bar" />
        <Chips names={["2+ attempts", "3+ attempts"]} chosen={attempts ? [`${attempts}+ attempts`] : []} choose={(names) => set("attempts", names.slice(-1).map((name) => name.split("+")[0]!))} />
        {run !== undefined && <button className="chip on" onClick={() => set("run", [])} title="Show all runs">run {visible(run)} ✕</button>}
      </div>
      <Problem error={error ?? figures.error ?? outputs.error} />
      {searched !== undefined && <p className="legend">Outputs were looked at of the first {number(searched)} rollouts that match all else: filter more to reach the others.</p>}
      {pages.byPage.get(0) && (
        <Table label="Rollouts" columns={columns} count={total} row={row} onRange={onRange} sort={sort}
          onSort={(next) => { const place = new URLSearchParams(search); place.set("sort", next.by); place.set("order", next.desc ? "desc" : "asc"); setSearch(place, { replace: true }); }}
          onOpen={(rollout) => void go(`/rollouts/${id(rollout.rollout_id)}`)}
          below={(rollout) => unfolded.has(rollout.rollout_id) && <Attempts rolloutId={rollout.rollout_id} />}
          empty={<Empty>No rollouts{status.length || mode.length || wanted || asked || replied || attempts || run ? " match" : " yet"}.</Empty>} />
      )}
    </>
  );
}

type Toggle = (change: (unfolded: ReadonlySet<string>) => ReadonlySet<string>) => void;

function columnsOf(figures: ReadonlyMap<string, Figures> | undefined, outputs: ReadonlyMap<string, string> | undefined,
  unfolded: ReadonlySet<string>, setUnfolded: Toggle, now: number): Column<Rollout>[] {
  const of = (rollout: Rollout) => figures?.get(rollout.rollout_id);
  const toggle = (rolloutId: string) => setUnfolded((before) => { const next = new Set(before); if (!next.delete(rolloutId)) next.add(rolloutId); return next; });
  return [
    { key: "fold", title: "", width: "28px", cell: (r) => <button className="fold" aria-expanded={unfolded.has(r.rollout_id)} aria-label="Attempts" onClick={() => toggle(r.rollout_id)}>{unfolded.has(r.rollout_id) ? "▾" : "▸"}</button> },
    { key: "rollout", title: "Rollout", width: "minmax(90px, 0.6fr)", sort: "rollout_id", cell: (r) => <RolloutLink id={r.rollout_id} /> },
    { key: "status", title: "Status", width: "94px", sort: "status", cell: (r) => <Badge kind={r.status} title={r.reason ?? undefined} /> },
    { key: "mode", title: "Mode", width: "54px", wide: true, sort: "mode", cell: (r) => <span className="dim">{r.mode ?? "–"}</span> },
    { key: "input", title: "Input", width: "minmax(90px, 2fr)", cell: (r) => <Short value={r.input} /> },
    { key: "output", title: "Output", width: "minmax(84px, 2fr)", wide: true, cell: (r) => { const text = outputs?.get(r.rollout_id); return text ? <Short value={text} /> : <span className="dim">–</span>; } },
    { key: "reward", title: "Reward", width: "64px", right: true, cell: (r) => <Reward value={of(r)?.reward} /> },
    { key: "verdict", title: "Verdict", width: "90px", wide: true, cell: (r) => { const found = of(r)?.verdict; return found && r.end_time ? <Badge kind={found.kind} title={found.reasons.join("\n") || undefined} /> : null; } },
    { key: "tokens", title: "Tokens", width: "62px", right: true, wide: true, cell: (r) => { const f = of(r); return f && f.prompt_tokens + f.response_tokens ? <span title={`${number(f.prompt_tokens)} read, ${number(f.response_tokens)} written`}>{short(f.prompt_tokens + f.response_tokens)}</span> : <span className="dim">–</span>; } },
    { key: "attempt", title: "Att.", width: "40px", right: true, wide: true, cell: (r) => r.attempt?.sequence_id ?? "–" },
    { key: "resources", title: "Resources", width: "minmax(80px, 0.5fr)", wide: true, sort: "resources_id", cell: (r) => r.resources_id ? <Link to={`/resources/${id(r.resources_id)}`} className="mono tail" title={r.resources_id}><bdi>{visible(r.resources_id)}{r.resources_version ? ` v${r.resources_version}` : ""}</bdi></Link> : <span className="dim">–</span> },
    { key: "start", title: "Queued", width: "86px", wide: true, sort: "start_time", cell: (r) => <span title={when(r.start_time)}>{ago(r.start_time, now)}</span> },
    { key: "took", title: "Duration", width: "90px", right: true, wide: true, cell: (r) => r.attempt ? <Took start={r.attempt.start_time} end={r.attempt.end_time ?? r.end_time} now={now} /> : <span className="dim">–</span> },
  ];
}

export const Reward = ({ value }: { value: number | null | undefined }) =>
  value == null ? <span className="dim">–</span> : <span className={value > 0 ? "good" : value < 0 ? "bad" : "zero"}>{figure(value)}</span>;

function Attempts({ rolloutId }: { rolloutId: string }) {
  const { data, error } = useQuery({ queryKey: ["attempts", rolloutId], queryFn: ({ signal }) => get<Page<Attempt>>(`/rollouts/${id(rolloutId)}/attempts`, {}, signal) });
  const now = useNow();
  return (
    <div className="attempts">
      <Problem error={error} />
      {data?.items.length === 0 && <span className="dim">No attempt yet.</span>}
      {data?.items.map((attempt) => (
        <div key={attempt.attempt_id} className="attempt">
          <b>#{attempt.sequence_id}</b>
          <Link className="mono" to={`/rollouts/${id(rolloutId)}?attempt=${id(attempt.attempt_id)}`}>{visible(attempt.attempt_id)}</Link>
          <Badge kind={attempt.status} />
          <span>{duration((attempt.end_time ?? now) - attempt.start_time)}</span>
          <span className="dim">heartbeat {ago(attempt.last_heartbeat_time, now)}</span>
          <span className="dim mono">{visible(attempt.worker_id ?? "")}</span>
          {attempt.error && <Short value={attempt.error} width={300} />}
        </div>
      ))}
    </div>
  );
}

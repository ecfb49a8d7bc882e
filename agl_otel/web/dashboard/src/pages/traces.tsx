// Spans of one rollout as a table: chosen, searched, sorted and paged by the store.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { Link, useSearchParams } from "react-router";
import { get, id, type Attempt, type Page, type Rollout, type Span } from "../api";
import { Badge, Empty, Head, Problem, useLater } from "../parts/common";
import { SpanPanel } from "../parts/span";
import { Table, type Column, type Sort } from "../parts/table";
import { useSettings } from "../settings";
import { duration, number, oneLine, visible, when } from "../text";

const PAGE = 100;

export function Traces() {
  const [search, setSearch] = useSearchParams();
  const { refreshMs } = useSettings();
  const [text, setText] = useState("");
  const wanted = useLater(text.trim());
  const [sort, setSort] = useState<Sort>({ by: "sequence_id", desc: false });
  const [page, setPage] = useState(0);
  const [open, setOpen] = useState<Span | null>(null);
  const typed = useLater(search.get("find") ?? "");
  const set = (values: Record<string, string>) => { const next = new URLSearchParams(search); for (const [name, value] of Object.entries(values)) if (value) next.set(name, value); else next.delete(name); setSearch(next, { replace: true }); setPage(0); setOpen(null); };
  const rollouts = useQuery({ queryKey: ["pick", typed], placeholderData: keepPreviousData, queryFn: ({ signal }) => get<Page<Rollout>>("/rollouts", { limit: 50, sort_order: "desc", rollout_id_contains: typed || undefined }, signal) });
  const rolloutId = search.get("rollout") ?? rollouts.data?.items[0]?.rollout_id ?? "";
  const attempts = useQuery({ queryKey: ["attempts", rolloutId], enabled: !!rolloutId, queryFn: ({ signal }) => get<Page<Attempt>>(`/rollouts/${id(rolloutId)}/attempts`, {}, signal) });
  const attemptId = search.get("attempt") ?? "";
  const asked = { rollout_id: rolloutId, attempt_id: attemptId || undefined, sort_by: sort.by, sort_order: sort.desc ? "desc" : "asc", limit: PAGE, offset: page * PAGE,
    ...(wanted ? { filter_logic: "or", name_contains: wanted, span_id_contains: wanted, trace_id_contains: wanted, parent_id_contains: wanted } : {}) };
  const spans = useQuery({ queryKey: ["spans", asked], enabled: !!rolloutId, placeholderData: keepPreviousData, refetchInterval: refreshMs || false, queryFn: ({ signal }) => get<Page<Span>>("/spans", asked, signal) });
  const mono = (value: string | null) => <span className="mono dim" title={value ?? ""}>{value ?? "–"}</span>;
  const columns: Column<Span>[] = [
    { key: "name", title: "Name", width: "minmax(160px, 1.5fr)", sort: "name", cell: (span) => <span className="strong">{oneLine(span.name, 120)}</span> },
    { key: "seq", title: "Seq.", width: "56px", right: true, wide: true, sort: "sequence_id", cell: (span) => span.sequence_id },
    { key: "trace", title: "Trace ID", width: "minmax(100px, 0.8fr)", wide: true, sort: "trace_id", cell: (span) => mono(span.trace_id) },
    { key: "span", title: "Span ID", width: "136px", wide: true, sort: "span_id", cell: (span) => mono(span.span_id) },
    { key: "parent", title: "Parent ID", width: "136px", wide: true, sort: "parent_id", cell: (span) => mono(span.parent_id) },
    { key: "status", title: "Status", width: "72px", sort: "status", cell: (span) => <Badge kind={span.status.status_code.toLowerCase()} title={span.status.description ?? undefined} /> },
    { key: "keys", title: "Attribute keys", width: "minmax(140px, 1.2fr)", wide: true, cell: (span) => <span className="dim" title={Object.keys(span.attributes).map(visible).join("\n")}>{oneLine(Object.keys(span.attributes).join(", "), 160)}</span> },
    { key: "start", title: "Start", width: "146px", wide: true, sort: "start_time", cell: (span) => when(span.start_time) },
    { key: "end", title: "End", width: "146px", wide: true, sort: "end_time", cell: (span) => when(span.end_time) },
    { key: "took", title: "Duration", width: "80px", right: true, cell: (span) => duration((span.end_time ?? 0) - (span.start_time ?? 0)) },
  ];
  const total = spans.data?.total ?? 0;
  return (
    <>
      <Head title="Traces"><span className="count">{number(total)}</span>
        <input type="search" placeholder="Search name or id" aria-label="Search spans" value={text} onChange={(event) => { setText(event.target.value); setPage(0); }} /></Head>
      <div className="filters">
        <label className="dim small">rollout <input list="rollouts" aria-label="Rollout" className="mono" placeholder={rolloutId} value={search.get("find") ?? ""}
          onChange={(event) => set({ find: event.target.value, ...(rollouts.data?.items.some((each) => each.rollout_id === event.target.value) ? { rollout: event.target.value, attempt: "" } : {}) })} /></label>
        <datalist id="rollouts">{rollouts.data?.items.map((each) => <option key={each.rollout_id} value={each.rollout_id}>{each.status}</option>)}</datalist>
        <label className="dim small">attempt <select aria-label="Attempt" value={attemptId} onChange={(event) => set({ attempt: event.target.value })}>
          <option value="">all</option>{attempts.data?.items.map((each) => <option key={each.attempt_id} value={each.attempt_id}>#{each.sequence_id} {each.status}</option>)}</select></label>
        {rolloutId && <Link className="button" to={`/rollouts/${id(rolloutId)}`}>Waterfall of {visible(rolloutId)}</Link>}
        {total > PAGE && <span className="line small"><button disabled={page === 0} onClick={() => setPage(page - 1)}>‹</button>{page * PAGE + 1} – {Math.min(total, (page + 1) * PAGE)}<button disabled={(page + 1) * PAGE >= total} onClick={() => setPage(page + 1)}>›</button></span>}
      </div>
      <Problem error={rollouts.error ?? spans.error} />
      <div className={open ? "split panelled" : "split none"}>
        {spans.data ? <Table label="Spans" columns={columns} count={spans.data.items.length} row={(index) => spans.data.items[index]} sort={sort} onSort={setSort} onOpen={setOpen} chosen={(span) => span === open} empty={<Empty>No spans.</Empty>} />
          : <Empty>{rollouts.data && !rolloutId ? "No rollouts yet." : ""}</Empty>}
        {open && <SpanPanel rolloutId={open.rollout_id} attemptId={open.attempt_id} spanId={open.span_id} close={() => setOpen(null)} />}
      </div>
    </>
  );
}

import { useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { get, type Page, type Worker } from "../api";
import { Badge, Chips, Empty, Head, Json, Mono, Problem, RolloutLink, useLater, useNow } from "../parts/common";
import { Table, type Column, type Sort } from "../parts/table";
import { useSettings } from "../settings";
import { ago, number, when } from "../text";

const LIMIT = 2000;
const GONE_SECONDS = 60; // twelve heartbeats of a runner

export function Workers() {
  const { refreshMs } = useSettings();
  const now = useNow();
  const [text, setText] = useState("");
  const wanted = useLater(text.trim());
  const [status, setStatus] = useState<string[]>([]);
  const [sort, setSort] = useState<Sort>({ by: "last_heartbeat_time", desc: true });
  const [open, setOpen] = useState("");
  const asked = useMemo(() => ({ worker_id_contains: wanted || undefined, status_in: status, sort_by: sort.by, sort_order: sort.desc ? "desc" : "asc", limit: LIMIT }), [wanted, status, sort]);
  const { data, error } = useQuery({ queryKey: ["workers", asked], queryFn: ({ signal }) => get<Page<Worker>>("/workers", asked, signal), refetchInterval: refreshMs || false, placeholderData: (before) => before });
  const stat = (worker: Worker, name: string) => { const value = worker.heartbeat_stats?.[name]; return typeof value === "number" ? `${Math.round(value)} %` : "–"; };
  const time = (key: "last_heartbeat_time" | "last_busy_time" | "last_idle_time" | "last_dequeue_time", title: string, wide = true): Column<Worker> =>
    ({ key, title, wide, width: "92px", sort: key, cell: (worker) => <span title={when(worker[key])}>{ago(worker[key], now)}</span> });
  const gone = (worker: Worker) => worker.last_heartbeat_time != null && now - worker.last_heartbeat_time > GONE_SECONDS;
  const columns: Column<Worker>[] = [
    { key: "worker", title: "Worker", width: "minmax(150px, 1.4fr)", sort: "worker_id", cell: (worker) => <Mono>{worker.worker_id}</Mono> },
    { key: "status", title: "Status", width: "86px", sort: "status", cell: (worker) => <Badge kind={gone(worker) ? "gone" : worker.status} title={gone(worker) ? `not heard of any more; last ${worker.status}` : undefined} /> },
    { key: "rollout", title: "Current rollout", width: "minmax(150px, 1fr)", wide: true, cell: (worker) => worker.current_rollout_id ? <RolloutLink id={worker.current_rollout_id} /> : <span className="dim">–</span> },
    { key: "attempt", title: "Current attempt", width: "minmax(120px, 1fr)", wide: true, cell: (worker) => worker.current_attempt_id ? <Mono>{worker.current_attempt_id}</Mono> : <span className="dim">–</span> },
    time("last_heartbeat_time", "Heartbeat", false), time("last_busy_time", "Last busy"), time("last_idle_time", "Last idle"), time("last_dequeue_time", "Last claim"),
    { key: "cpu", title: "CPU", width: "58px", right: true, wide: true, cell: (worker) => stat(worker, "cpu_usage_pct") },
    { key: "mem", title: "Mem", width: "58px", right: true, wide: true, cell: (worker) => stat(worker, "mem_pct") },
  ];
  return (
    <>
      <Head title="Workers"><span className="count">{number(data?.total)}</span>
        <input type="search" placeholder="Search by id" aria-label="Search by id" value={text} onChange={(event) => setText(event.target.value)} /></Head>
      <div className="filters"><Chips names={["busy", "idle", "unknown"]} chosen={status} choose={setStatus} /></div>
      <Problem error={error} />
      {data && <Table label="Workers" columns={columns} count={data.items.length} row={(index) => data.items[index]} sort={sort} onSort={setSort}
        onOpen={(worker) => setOpen(open === worker.worker_id ? "" : worker.worker_id)}
        below={(worker) => open === worker.worker_id && <div className="attempts"><Json value={worker} /></div>}
        empty={<Empty>No worker yet. Start one with <code>agl-otel runner</code>.</Empty>} />}
    </>
  );
}

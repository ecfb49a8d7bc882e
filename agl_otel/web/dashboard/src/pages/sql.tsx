// Read-only SQL over what was observed. What may run and what it may cost is decided by the service's ClickHouse port, not here.
import { useMutation } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { post, type Answer, type Json } from "../api";
import { Empty, Head, Problem } from "../parts/common";
import { Table, type Column } from "../parts/table";
import { duration, number, oneLine } from "../text";

// The first is that of docs/traces.md.
const EXAMPLES: readonly (readonly [string, string])[] = [
  ["Rewards by day", "SELECT toDate(began) AS day, count() AS attempts, countIf(abs(reward) <= 1e9) AS rewarded, avgIf(reward, abs(reward) <= 1e9) AS mean\nFROM (\n  WITH if(Facts['agentlightning.late'] = 'true', NULL, toFloat64OrNull(Rewards['agentlightning.reward.0.value'])) AS value,\n    mapContains(Rewards, 'agentlightning.reward.given') AS given, toInt64OrZero(Rewards['agentlightning.reward.0.time']) AS time,\n    argMaxIf((value, given, toUnixTimestamp64Nano(Timestamp)), (given, SequenceId), isNotNull(value) AND time = 0) AS emitted,\n    argMaxIf((value, time), (time, Rewards['agentlightning.reward.0.name'], isNaN(value), value), isNotNull(value) AND time > 0) AS judged\n  SELECT min(Timestamp) AS began, if(emitted.2 OR emitted.3 > judged.2, emitted.1, judged.1) AS reward\n  FROM otel_traces WHERE RolloutId != '' GROUP BY RolloutId, AttemptId)\nGROUP BY day ORDER BY day"],
  ["Spans by name", "SELECT SpanName, uniqExact(TraceId, SpanId) AS spans, round(avg(Duration) / 1e6, 1) AS mean_ms, countIf(StatusCode = 'Error') AS errors\nFROM otel_traces\nWHERE RolloutId != ''\nGROUP BY SpanName\nORDER BY spans DESC"],
  ["Slowest model calls", "SELECT RolloutId, SpanId, Duration / 1e9 AS seconds, length(PromptTokenIds) AS prompt, length(ResponseTokenIds) AS response\nFROM otel_traces\nWHERE SpanName = 'agentlightning.llm'\nORDER BY Duration DESC\nLIMIT 50"],
  ["Errors", "SELECT Timestamp, RolloutId, SpanName, StatusMessage\nFROM otel_traces\nWHERE StatusCode = 'Error'\nORDER BY Timestamp DESC\nLIMIT 100"],
  ["Columns of the spans", "DESCRIBE otel_traces"],
];

export function Sql() {
  const [query, setQuery] = useState(EXAMPLES[0]![1]);
  const [took, setTook] = useState(0);
  const run = useMutation({
    mutationFn: async (text: string) => {
      const start = performance.now();
      const answer = await post<Answer>("/sql", { query: text });
      setTook((performance.now() - start) / 1000);
      return answer;
    },
  });
  const found = run.data;
  const columns = useMemo<Column<Json[]>[]>(() => (found?.columns ?? []).map((name, place) => {
    const numeric = /^(Nullable\()?(U?Int|Float|Decimal)/.test(found!.types[place]!);
    return { key: `${place}`, title: name, width: `minmax(${numeric ? 90 : 150}px, ${numeric ? 0.6 : 1.5}fr)`, right: numeric, cell: (row) => <span className={numeric ? "mono" : "mono dim-value"} title={oneLine(row[place] ?? "null", 1500)}>{row[place] === null ? <i className="dim">null</i> : oneLine(row[place], 300)}</span> };
  }), [found]);
  return (
    <>
      <Head title="SQL"><span className="dim small">read-only, over the tables of ClickHouse</span></Head>
      <div className="sql">
        <div className="chips">{EXAMPLES.map(([name, text]) => <button key={name} className="chip" onClick={() => { setQuery(text); run.mutate(text); }}>{name}</button>)}</div>
        <textarea aria-label="Query" spellCheck={false} rows={Math.min(14, Math.max(5, query.split("\n").length + 1))} value={query} onChange={(event) => setQuery(event.target.value)}
          onKeyDown={(event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run.mutate(query); } }} />
        <div className="line">
          <button className="primary" disabled={run.isPending} onClick={() => run.mutate(query)}>{run.isPending ? "Running…" : "Run"}</button>
          <kbd>Ctrl</kbd><kbd>Enter</kbd>
          {found && !run.isPending && <span className="dim">{number(found.rows.length)} rows{found.truncated ? ", and there are more: set a LIMIT or aggregate" : ""} in {duration(took)}</span>}
        </div>
        <Problem error={run.error} />
      </div>
      {found && <Table label="Rows" columns={columns} count={found.rows.length} row={(index) => found.rows[index]} rowHeight={28} empty={<Empty>No rows.</Empty>} />}
    </>
  );
}

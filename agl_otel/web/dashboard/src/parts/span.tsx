// What one span says, read when it is asked for.
import { useQuery } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { get, id, type Json as JsonValue, type Page, type Span, type Tokens as TokensType } from "../api";
import { Badge, Json, Problem, Text } from "./common";
import { TokenView } from "./tokens";
import { duration, figure, masked, number, visible, when } from "../text";

const LONG = new Set(["agentlightning.llm.prompt_token_ids", "agentlightning.llm.response_token_ids", "agentlightning.llm.response_logprobs"]);

type Asked = { rolloutId: string; attemptId: string; spanId: string };

// `proxyId` is the proxy's span of the same model call.
export function SpanPanel({ proxyId, close, ...asked }: Asked & { proxyId?: string; close: () => void }) {
  return (
    <aside className="panel" aria-label="Span">
      <Said {...asked} trail={<button className="plain" onClick={close} aria-label="Close">✕</button>} />
      {proxyId && <Said {...asked} spanId={proxyId} />}
    </aside>
  );
}

function Said({ rolloutId, attemptId, spanId, trail }: Asked & { trail?: ReactNode }) {
  const { data, error } = useQuery({ queryKey: ["span", rolloutId, attemptId, spanId], queryFn: ({ signal }) => get<Page<Span>>("/spans", { rollout_id: rolloutId, attempt_id: attemptId, span_id: spanId, limit: 1 }, signal) });
  const span = data?.items[0];
  return (
    <>
      <div className="line"><h2>{span ? visible(span.name) : "Span"}</h2>{trail}</div>
      <Problem error={error} />
      {data && !span && <p className="empty">There is no such span.</p>}
      {span && (
        <>
          <dl className="pairs">
            <dt>status</dt><dd><Badge kind={span.status.status_code.toLowerCase()} /> {visible(span.status.description ?? "")}</dd>
            <dt>began</dt><dd>{when(span.start_time)}</dd>
            <dt>took</dt><dd>{duration((span.end_time ?? 0) - (span.start_time ?? 0))}</dd>
            <dt>trace</dt><dd className="mono">{span.trace_id}</dd>
            <dt>span</dt><dd className="mono">{span.span_id}</dd>
            <dt>parent</dt><dd className="mono">{span.parent_id ?? "–"}</dd>
            <dt>sequence</dt><dd>{span.sequence_id}</dd>
          </dl>
          {"agentlightning.llm.response_token_ids" in span.attributes && <Tokens rolloutId={rolloutId} attemptId={attemptId} spanId={spanId} />}
          <h3>Attributes</h3>
          <Pairs values={masked(span.attributes) as Record<string, JsonValue>} />
          {span.events.length > 0 && <h3>Events</h3>}
          {span.events.map((event, place) => <div key={place} className="event"><b>{visible(event.name)}</b> <span className="dim">{when(event.timestamp)}</span><Pairs values={masked(event.attributes) as Record<string, JsonValue>} /></div>)}
          {span.links.length > 0 && <><h3>Links</h3><Json value={span.links} /></>}
          <h3>Resource</h3>
          <Pairs values={masked(span.resource.attributes) as Record<string, JsonValue>} />
        </>
      )}
    </>
  );
}

function Pairs({ values }: { values: Record<string, JsonValue> }) {
  return (
    <dl className="pairs">
      {Object.entries(values).map(([key, value]) => [
        <dt key={key} title={visible(key)}>{visible(key)}</dt>,
        <dd key={`${key} `}>{LONG.has(key) && Array.isArray(value) ? <span className="dim">{number(value.length)} values</span> : <Value value={value} />}</dd>,
      ])}
    </dl>
  );
}

function Value({ value }: { value: JsonValue }) {
  if (typeof value === "number") return <span className="mono">{Number.isInteger(value) ? value : figure(value)}</span>;
  if (typeof value === "string") {
    const start = value.trimStart()[0];
    if ((start === "{" || start === "[") && value.length < 200_000) {
      try {
        return <Text text={JSON.stringify(JSON.parse(value), null, 2)} mono height={300} />;
      } catch { /* text that only looks like JSON */ }
    }
    return <Text text={value} height={300} mono />;
  }
  return <Text text={JSON.stringify(value)} mono height={300} />;
}

export function Tokens({ rolloutId, attemptId, spanId, shown = false }: { rolloutId: string; attemptId: string; spanId: string; shown?: boolean }) {
  const [open, setOpen] = useState(shown);
  const { data, error, isFetching } = useQuery({ queryKey: ["tokens", rolloutId, attemptId, spanId], enabled: open, staleTime: Infinity, queryFn: ({ signal }) => get<TokensType>(`/rollouts/${id(rolloutId)}/tokens`, { attempt_id: attemptId, span_id: spanId }, signal) });
  return (
    <div className="tokens-box">
      <button onClick={() => setOpen(!open)} aria-expanded={open}>{open ? "Hide tokens" : "Token ids and log-probs"}</button>
      {open && isFetching && <span className="dim"> reading…</span>}
      <Problem error={error} />
      {open && data && <TokenView tokens={data} />}
    </div>
  );
}

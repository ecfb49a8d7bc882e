// Spans as a tree in the order of time, flat: one row for each span that is not folded away.
import type { OutlineSpan } from "../api";

// `proxy` is the same model call as our proxy recorded it: one node with the agent's own span.
export const SEAL = "agentlightning.seal", ATTEMPT = "agentlightning.attempt";
export type Node = { span: OutlineSpan; proxy?: OutlineSpan; depth: number; children: number; from: number; length: number };

/** `start` and `end` are of what happened: a seal is written when all is over, and the span of the attempt marks when it was claimed. */
export function arrange(spans: OutlineSpan[], folded: ReadonlySet<string>): { rows: Node[]; start: number; end: number; deepest: number } {
  if (!spans.length) return { rows: [], start: 0, end: 1, deepest: 0 };
  // Nanoseconds since 1970 are more than a number holds exactly: count from the first span.
  const zero = spans.reduce((first, span) => { const at = BigInt(span.start_nano); return at < first ? at : first; }, BigInt(spans[0]!.start_nano));
  const from = new Map(spans.map((span) => [span, Number(BigInt(span.start_nano) - zero)]));
  const known = new Set(spans.map((span) => span.span_id));
  const proxies = new Map(spans.filter((span) => span.within && known.has(span.within)).map((span) => [span.within, span]));
  const moved = new Set(proxies.values());
  const below = new Map<string, OutlineSpan[]>();
  const roots: OutlineSpan[] = [];
  const order = [...spans].sort((a, b) => from.get(a)! - from.get(b)! || a.sequence_id - b.sequence_id);
  for (const span of order) {
    if (moved.has(span)) continue;
    if (span.parent_id && span.parent_id !== span.span_id && known.has(span.parent_id)) {
      const list = below.get(span.parent_id);
      if (list) list.push(span); else below.set(span.parent_id, [span]);
    } else roots.push(span);
  }
  const rows: Node[] = [];
  const seen = new Set<OutlineSpan>();
  let start = Infinity, end = 1, deepest = 0;
  function walk(tops: OutlineSpan[], hidden: boolean) {
    const stack = [...tops].reverse().map((span) => ({ span, depth: 0, hidden }));
    while (stack.length) { // not recursive: an agent's trace may be deeper than the stack
      const { span, depth, hidden: under } = stack.pop()!;
      if (seen.has(span)) continue;
      seen.add(span);
      const length = Number(span.duration_nano), at = from.get(span)!;
      if (span.name !== ATTEMPT) start = Math.min(start, at);
      end = Math.max(end, at + length);
      deepest = Math.max(deepest, depth);
      const children = below.get(span.span_id) ?? [];
      if (!under) rows.push({ span, proxy: proxies.get(span.span_id), depth, children: children.length, from: at, length });
      for (const child of [...children].reverse()) stack.push({ span: child, depth: depth + 1, hidden: under || folded.has(span.span_id) });
    }
  }
  walk(roots, false);
  walk(order.filter((span) => !seen.has(span) && !moved.has(span)), false); // spans that are their own ancestors
  return { rows, start: Number.isFinite(start) ? start : 0, end, deepest };
}

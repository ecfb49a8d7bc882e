import { useEffect, useRef, useState, useSyncExternalStore, type ReactNode } from "react";
import { Link } from "react-router";
import { brief, duration, oneLine, visible } from "../text";

export const STATUS_ORDER = ["succeeded", "running", "preparing", "requeuing", "queuing", "failed", "cancelled"] as const;

export function Head({ title, children, trail }: { title: ReactNode; children?: ReactNode; trail?: ReactNode }) {
  return (
    <header className="head">
      <h1>{trail}{title}</h1>
      <div className="tools">{children}</div>
    </header>
  );
}

export const Badge = ({ kind, children, title }: { kind: string; children?: ReactNode; title?: string }) => (
  <span className={`badge ${kind.replace(/[^a-z]/gi, "")}`} title={title}>{children ?? kind}</span>
);

export function Problem({ error }: { error: unknown }) {
  if (!error) return null;
  return <p className="problem" role="alert">{visible(error instanceof Error ? error.message : String(error))}</p>;
}

export const Empty = ({ children }: { children: ReactNode }) => <p className="empty">{children}</p>;

export function Stat({ name, children, sub }: { name: string; children: ReactNode; sub?: ReactNode }) {
  return (
    <div className="stat">
      <span className="name">{name}</span>
      <strong>{children}</strong>
      {sub && <span className="sub">{sub}</span>}
    </div>
  );
}

export function Bars({ parts, total, small }: { parts: readonly (readonly [string, number])[]; total: number; small?: boolean }) {
  const shown = parts.filter(([, count]) => count > 0);
  return (
    <div className={small ? "bars small" : "bars"} role="img" aria-label={shown.map(([kind, count]) => `${kind} ${count}`).join(", ")}
      title={shown.map(([kind, count]) => `${kind} ${count.toLocaleString("en-US")}`).join("\n")}>
      {shown.map(([kind, count]) => <i key={kind} className={kind} style={{ flexGrow: count / Math.max(total, 1) }} />)}
    </div>
  );
}

export const Mono = ({ children, title }: { children: string; title?: string }) => <code title={title ?? children}>{visible(children)}</code>;

export const RolloutLink = ({ id, children }: { id: string; children?: ReactNode }) => (
  <Link to={`/rollouts/${encodeURIComponent(id)}`} className="mono tail" title={id}><bdi>{children ?? visible(id)}</bdi></Link>
);

/** JSON as people read it: folded when long, never anything but text. */
export function Json({ value, height = 420 }: { value: unknown; height?: number }) {
  const text = typeof value === "string" ? value : JSON.stringify(value, null, 2) ?? "";
  return <Text text={text} height={height} mono />;
}

export function Text({ text, height, mono }: { text: string; height?: number; mono?: boolean }) {
  const [whole, setWhole] = useState(false);
  const limit = 6000;
  const cut = !whole && text.length > limit;
  return (
    <div className={mono ? "text mono" : "text"} style={{ maxHeight: whole ? undefined : height }}>
      {visible(cut ? text.slice(0, limit) : text)}
      {cut && <button className="more" onClick={() => setWhole(true)}>… show all {text.length.toLocaleString("en-US")} characters</button>}
    </div>
  );
}

export const Short = ({ value, width = 300 }: { value: unknown; width?: number }) => <span className="dim-value" title={oneLine(value, 1500)}>{brief(value, width)}</span>;

const small = window.matchMedia("(max-width: 760px)");
/** Whether the window is as narrow as a phone. */
export const useNarrow = (): boolean => useSyncExternalStore(
  (tell) => { small.addEventListener("change", tell); return () => small.removeEventListener("change", tell); },
  () => small.matches,
);

export function useNow(everyMs = 1000): number {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now() / 1000), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return now;
}

export const Took = ({ start, end, now }: { start: number; end: number | null; now: number }) => (
  <span className={end == null ? "going" : ""}>{duration((end ?? now) - start)}</span>
);

/** `value` at once where it had rested for `ms`, else when it rests again: a letter or a pasted id is looked for now, a word once. */
export function useLater<T>(value: T, ms = 200): T {
  const [later, setLater] = useState(value);
  const changedAt = useRef(-Infinity);
  useEffect(() => {
    if (value === later) return;
    const rested = performance.now() - changedAt.current > ms;
    changedAt.current = performance.now();
    if (rested) { setLater(value); return; }
    const timer = setTimeout(() => setLater(value), ms);
    return () => clearTimeout(timer);
  }, [value, ms]);
  return later;
}

export function Tabs<T extends string>({ names, chosen, choose }: { names: readonly (readonly [T, string])[]; chosen: T; choose: (name: T) => void }) {
  return (
    <div className="tabs" role="tablist">
      {names.map(([name, title]) => (
        <button key={name} role="tab" aria-selected={name === chosen} className={name === chosen ? "on" : ""} onClick={() => choose(name)}>{title}</button>
      ))}
    </div>
  );
}

export function Chips({ names, chosen, choose }: { names: readonly string[]; chosen: readonly string[]; choose: (names: string[]) => void }) {
  return (
    <div className="chips">
      {names.map((name) => (
        <button key={name} aria-pressed={chosen.includes(name)} className={`chip ${name.replaceAll(" ", "-")} ${chosen.includes(name) ? "on" : ""}`}
          onClick={() => choose(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name])}>{name}</button>
      ))}
    </div>
  );
}

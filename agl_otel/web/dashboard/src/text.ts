// Values as short texts.

export const number = (value: number | null | undefined): string => (value == null ? "–" : value.toLocaleString("en-US"));

export function short(value: number | null | undefined): string {
  if (value == null) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]] as const) {
    if (Math.abs(value) >= size) return `${(value / (unit === "k" ? 1e3 : size)).toFixed(Math.abs(value) >= 10 * size ? 0 : 1)}${unit}`;
  }
  return value.toLocaleString("en-US");
}

export function figure(value: number | null | undefined): string {
  if (value == null) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size < 0.001 ? String(Number(value.toPrecision(3))) : String(Number(value.toFixed(3)));
}

export function duration(seconds: number | null | undefined): string {
  if (seconds == null || Number.isNaN(seconds)) return "–";
  if (seconds <= 0) return "0 ms";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${seconds < 0.01 ? (seconds * 1000).toFixed(1) : Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function ago(time: number | null | undefined, now: number): string {
  if (time == null) return "–";
  const past = Math.floor(now - time);
  if (past < 1) return "now";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]] as const) if (past >= 2 * size) return `${Math.floor(past / size)} ${unit} ago`;
  return `${past} s ago`;
}

export function when(time: number | null | undefined): string {
  if (time == null) return "–";
  const date = new Date(time * 1000);
  const two = (part: number) => String(part).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

// What an agent wrote may hold terminal escapes, directions and other characters that hide or move text: they are shown, never obeyed.
// eslint-disable-next-line no-control-regex
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
export const visible = (text: string): string =>
  text.replace(HIDDEN, (c) => (c === "\u001b" ? "␛" : c.charCodeAt(0) < 32 ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`));

export function oneLine(value: unknown, width = 200): string {
  const text = typeof value === "string" ? value : JSON.stringify(value) ?? "";
  const line = visible(text.slice(0, width * 2).replace(/\s+/g, " "));
  return line.length > width ? `${line.slice(0, width - 1)}…` : line;
}

/** A value as a person would say it in a line: the fields of a task without JSON's quotes, and without the name of the first if that is a text. */
export function brief(value: unknown, width = 200): string {
  if (!value || typeof value !== "object" || Array.isArray(value)) return oneLine(value, width);
  const said = Object.entries(value).map(([name, field], place) =>
    typeof field !== "string" ? `${name}: ${JSON.stringify(field)}` : place ? `${name}: ${field}` : field);
  return oneLine(said.join(", "), width);
}

const SECRET = /(^|_)(api_?key|token|secret|password|authorization)$/i;
/** The value without what is secret: a page may be photographed. */
export function masked(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(masked);
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, SECRET.test(key) && typeof item === "string" && item ? "••••••" : masked(item)]));
  return value;
}

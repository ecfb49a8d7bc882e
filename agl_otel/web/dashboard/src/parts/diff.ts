// Lines that were added and removed: the longest common subsequence, between the first and the last line that differ.
export type Line = { kind: " " | "+" | "-"; text: string };
const LARGEST = 4_000_000;

export function diff(before: string, after: string): Line[] {
  const a = before ? before.split("\n") : [], b = after ? after.split("\n") : [];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const same = (text: string): Line => ({ kind: " ", text });
  return [...a.slice(0, start).map(same), ...middle(a.slice(start, a.length - end), b.slice(start, b.length - end)), ...a.slice(a.length - end).map(same)];
}

function middle(a: string[], b: string[]): Line[] {
  const removed = a.map((text): Line => ({ kind: "-", text })), added = b.map((text): Line => ({ kind: "+", text }));
  if (!a.length || !b.length || a.length * b.length > LARGEST) return [...removed, ...added];
  const width = b.length + 1;
  const table = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1]! + 1 : Math.max(table[(i + 1) * width + j]!, table[i * width + j + 1]!);
  const lines: Line[] = [];
  let i = 0, j = 0;
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) { lines.push({ kind: " ", text: a[i]! }); i++; j++; }
    else if (table[(i + 1) * width + j]! >= table[i * width + j + 1]!) lines.push(removed[i++]!);
    else lines.push(added[j++]!);
  }
  return [...lines, ...removed.slice(i), ...added.slice(j)];
}

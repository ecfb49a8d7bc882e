// What a person chose for this browser: kept in localStorage, heard by every component that uses it.
import { useSyncExternalStore } from "react";

export type Theme = "system" | "light" | "dark";
/** Prices are of a million tokens, in whatever money; null: not said. The reviewer is the source of reviews; tokens: whether they show them. */
export type Settings = { theme: Theme; refreshMs: number; promptPrice: number | null; responsePrice: number | null; reviewer: string; tokens: boolean };
const KEY = "agl-settings";
const DEFAULT: Settings = { theme: "system", refreshMs: 5000, promptPrice: null, responsePrice: null, reviewer: "", tokens: false };
const listeners = new Set<() => void>();
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function read(): Settings {
  try {
    return { ...DEFAULT, ...(JSON.parse(localStorage.getItem(KEY) ?? "{}") as Partial<Settings>) };
  } catch {
    return DEFAULT;
  }
}

let current = read();

export function apply(): void {
  const chosen = current.theme === "system" ? (dark.matches ? "dark" : "light") : current.theme;
  document.documentElement.dataset.theme = chosen;
}
dark.addEventListener("change", apply);

export function change(part: Partial<Settings>): void {
  current = { ...current, ...part };
  localStorage.setItem(KEY, JSON.stringify(current));
  apply();
  listeners.forEach((tell) => tell());
}

export const useSettings = (): Settings =>
  useSyncExternalStore(
    (tell) => {
      listeners.add(tell);
      return () => listeners.delete(tell);
    },
    () => current,
  );

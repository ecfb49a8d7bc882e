import { useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { token } from "../api";
import { Head, Tabs } from "../parts/common";
import { change, useSettings, type Theme } from "../settings";

const EVERY = [["0", "off"], ["2000", "2 s"], ["5000", "5 s"], ["15000", "15 s"], ["60000", "1 min"]] as const;

export function SettingsPage() {
  const { theme, refreshMs, promptPrice, responsePrice } = useSettings();
  const [value, setValue] = useState(token.get());
  const client = useQueryClient();
  return (
    <>
      <Head title="Settings" />
      <div className="scroll">
        <section className="card form">
          <h2>Look</h2>
          <Tabs<Theme> names={[["system", "as the system"], ["light", "light"], ["dark", "dark"]]} chosen={theme} choose={(next) => change({ theme: next })} />
          <h2>Look again every</h2>
          <Tabs names={EVERY} chosen={String(refreshMs) as (typeof EVERY)[number][0]} choose={(next) => change({ refreshMs: Number(next) })} />
          <h2>Price of a million tokens</h2>
          <p className="dim">With it, a run shows what it cost. It is kept in this browser.</p>
          <p className="line">
            <label>read <Price value={promptPrice} change={(next) => change({ promptPrice: next })} /></label>
            <label>written <Price value={responsePrice} change={(next) => change({ responsePrice: next })} /></label>
          </p>
          <h2>Token</h2>
          <p className="dim">A stack with <code>AGL_TOKEN</code> asks for it. It is kept until this tab is closed, and sent to this address only.</p>
          <form className="line" onSubmit={(event) => { event.preventDefault(); token.set(value); void client.invalidateQueries(); }}>
            <input type="password" autoComplete="off" aria-label="Token" value={value} onChange={(event) => setValue(event.target.value)} />
            <button>Use it</button>
          </form>
          <h2>Behind this page</h2>
          <p className="dim">All that it shows comes from <code>/v1/agl</code> at this address; <a href="/v1/agl/openapi.json">its OpenAPI document</a> lists the routes.</p>
        </section>
      </div>
    </>
  );
}

const Price = ({ value, change }: { value: number | null; change: (next: number | null) => void }) => (
  <input type="number" min={0} step="any" value={value ?? ""} onChange={(event) => change(event.target.value === "" ? null : Math.max(0, Number(event.target.value)))} />
);

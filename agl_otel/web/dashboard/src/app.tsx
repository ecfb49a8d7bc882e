import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useEffect, useState, type ReactNode } from "react";
import { Navigate, NavLink, Route, Routes, useLocation } from "react-router";
import { ApiError, get, token, type Statistics } from "./api";
import { Resources, ResourceVersions } from "./pages/resources";
import { Review } from "./pages/review";
import { Rollout } from "./pages/rollout";
import { Rollouts } from "./pages/rollouts";
import { Run, Runs } from "./pages/runs";
import { SettingsPage } from "./pages/settings";
import { Sql } from "./pages/sql";
import { Traces } from "./pages/traces";
import { Workers } from "./pages/workers";
import { change, useSettings } from "./settings";
import { short } from "./text";

const PAGES = [
  ["/runs", "Runs", "M3 15l4-6 4 3 6-8"],
  ["/rollouts", "Rollouts", "M3 5h14M3 10h14M3 15h14"],
  ["/traces", "Traces", "M3 5h7M6 10h9M10 15h7"],
  ["/review", "Review", "M3 11l4 4 10-10"],
  ["/resources", "Resources", "M10 3l7 4-7 4-7-4zM3 12l7 4 7-4"],
  ["/runners", "Workers", "M4 5h12v8H4zM7 17h6"],
  ["/sql", "SQL", "M5 6l4 4-4 4M11 14h5"],
  ["/settings", "Settings", "M4 6h12M4 14h12M8 4v4M13 12v4"],
] as const;

export function App() {
  const place = useLocation();
  useEffect(() => {
    const page = PAGES.find(([path]) => place.pathname.startsWith(path));
    document.title = `${page ? page[1] : "agl-otel"} · agl-otel`;
  }, [place.pathname]);
  return (
    <div className="shell">
      <Side />
      <main className="page" id="main">
        <Routes>
          <Route path="/" element={<Navigate to="/rollouts" replace />} />
          <Route path="/runs" element={<Runs />} />
          <Route path="/runs/view" element={<Run />} />
          <Route path="/rollouts" element={<Rollouts />} />
          <Route path="/rollouts/:rolloutId" element={<Rollout />} />
          <Route path="/traces" element={<Traces />} />
          <Route path="/review" element={<Review />} />
          <Route path="/resources" element={<Resources />} />
          <Route path="/resources/:resourcesId" element={<ResourceVersions />} />
          <Route path="/runners" element={<Workers />} />
          <Route path="/workers" element={<Navigate to="/runners" replace />} />
          <Route path="/sql" element={<Sql />} />
          <Route path="/settings" element={<SettingsPage />} />
          <Route path="*" element={<Missing />} />
        </Routes>
      </main>
    </div>
  );
}

function Side() {
  const { refreshMs, theme } = useSettings();
  const { data, error, isFetching } = useQuery({
    queryKey: ["statistics"],
    queryFn: ({ signal }) => get<Statistics>("/statistics", {}, signal),
    refetchInterval: refreshMs || false,
  });
  const running = data ? (data.rollouts_by_status.running ?? 0) + (data.rollouts_by_status.preparing ?? 0) : undefined;
  const locked = error instanceof ApiError && error.status === 401;
  return (
    <nav className="side" aria-label="Pages">
      <a className="skip" href="#main">Skip to the page</a>
      <NavLink to="/runs" className="brand">
        <img src="/icon.svg" alt="" width="22" height="22" /> agl-otel
      </NavLink>
      {PAGES.map(([path, name, icon]) => (
        <NavLink key={path} to={path} className="nav">
          <svg viewBox="0 0 20 20" aria-hidden="true"><path d={icon} /></svg>
          {name}
        </NavLink>
      ))}
      <div className="foot">
        {locked && <TokenForm />}
        {error && !locked && <p className="bad small">{error.message}</p>}
        {data && (
          <dl className="mini">
            <dt>running</dt><dd>{short(running)}</dd>
            <dt>queued</dt><dd>{short(data.claimable)}</dd>
            <dt>rollouts</dt><dd>{short(data.total_rollouts)}</dd>
            <dt>spans</dt><dd>{short(data.total_spans)}</dd>
          </dl>
        )}
        <div className="row">
          <button className={`live ${refreshMs ? "on" : ""}`} onClick={() => change({ refreshMs: refreshMs ? 0 : 5000 })} aria-pressed={!!refreshMs}
            title={refreshMs ? "Looks again every few seconds; press to stop" : "Stands still; press to follow"}>
            <i className={isFetching ? "busy" : ""} /> {refreshMs ? "live" : "paused"}
          </button>
          <button className="plain" title="Light or dark" aria-label="Light or dark"
            onClick={() => change({ theme: document.documentElement.dataset.theme === "dark" ? "light" : "dark" })}>
            {theme === "light" || document.documentElement.dataset.theme === "light" ? "☾" : "☀"}
          </button>
        </div>
      </div>
    </nav>
  );
}

function TokenForm() {
  const [value, setValue] = useState("");
  const client = useQueryClient();
  return (
    <form className="token" onSubmit={(event) => { event.preventDefault(); token.set(value); void client.invalidateQueries(); }}>
      <label htmlFor="token">This stack wants its token (AGL_TOKEN).</label>
      <input id="token" type="password" autoComplete="off" value={value} onChange={(event) => setValue(event.target.value)} />
      <button>Use it</button>
    </form>
  );
}

function Missing(): ReactNode {
  return <p className="empty">There is no such page.</p>;
}

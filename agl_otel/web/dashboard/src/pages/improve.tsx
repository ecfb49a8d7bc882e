// A run of `agl-otel improve`: what each cycle learnt from, what speaks for and against what it made, and what became of that.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { Fragment, useEffect, useRef, useState, type ReactNode } from "react";
import { Link, useSearchParams } from "react-router";
import { get, id, post, type Cycle, type Figures, type Page, type Training } from "../api";
import { Badge, Empty, Head, Mono, Problem, RolloutLink, Stat, useNow } from "../parts/common";
import { Chart, type Point } from "../parts/chart";
import { useSettings } from "../settings";
import { ago, figure, number, visible, when } from "../text";
import { Reward } from "./rollouts";

const PAGE = 50, MOST = 1000;
const SILENT_SECONDS = 180; // a run that is under way tells each minute at least
const COLUMNS = [["Cycle"], ["Ended", "wide"], ["Verdict"], ["Held-out score"], ["Back-test", "wide"], ["Drift", "wide"], ["Canary", "wide"], ["Version", "wide"], ["Made by", "wide"]] as const;
const signed = (value: number | null) => (value !== null && value > 0 ? "+" : "") + figure(value);
const told = (cycle: Cycle) => cycle.stage ? `${cycle.stage} under way` : cycle.verdict.replace("_", " ");
const view = (run: string) => `/runs/view?run=${id(run)}`;
const versionOf = (cycle: Cycle, version: string) => <Link to={`/resources/${id(cycle.resources_id)}?version=${id(version)}`}>{visible(version)}</Link>;
const alarms = (cycle: Cycle) => cycle.reasons.some((reason) => reason.alarm);

export function Improvement({ run, trained }: { run: string; trained: Training }) {
  const { refreshMs } = useSettings();
  const now = useNow(5000);
  const { data, error } = useQuery({ queryKey: ["cycles", run], queryFn: ({ signal }) => get<Cycle[]>("/runs/cycles", { run }, signal), refetchInterval: refreshMs ? refreshMs * 2 : false });
  const cycles = data ?? [], ended = cycles.filter((cycle) => !cycle.stage);
  const last = ended.at(-1), promoted = cycles.filter((cycle) => cycle.verdict === "promoted"), alarmed = cycles.filter(alarms);
  const points = (read: (cycle: Cycle) => Omit<Point, "x"> | null) => cycles.flatMap((cycle) => { const found = read(cycle); return found ? [{ x: cycle.cycle, note: told(cycle), ...found }] : []; });
  const line = (name: string, color: string, read: (cycle: Cycle) => number | null) => (
    { name, color, points: points((cycle) => { const y = read(cycle); return y === null ? null : { y }; }) });
  const after = points(({ held_out_before: from, held_out_after: to, held_out_gain_low: low, held_out_gain_high: high }) =>
    to === null ? null : from === null || low === null || high === null ? { y: to } : { y: to, low: from + low, high: from + high });
  return (
    <>
      <Head trail={<Link to="/runs">Runs</Link>} title={<span> / {visible(run)}</span>} />
      <Problem error={error} />
      <div className="scroll">
        {trained.outcome.startsWith("error") && <p className="problem" role="alert">The run ended with an {visible(trained.outcome)}</p>}
        {alarmed.length > 0 && <p className="problem">Alarm of an exploited reward: {alarmed.map((cycle, place) =>
          <Fragment key={cycle.cycle}>{place > 0 && ", "}<Link to={`${view(run)}&cycle=${cycle.cycle}`}>cycle {cycle.cycle}</Link></Fragment>)}</p>}
        {data && (
          <div className="stats">
            <Stat name="Cycles" sub={trained.outcome.split(":")[0] || undefined}>{number(ended.length)}</Stat>
            <Stat name="Promoted">{number(promoted.length)}</Stat>
            <Stat name="Rolled back" sub="after a canary">{number(cycles.filter((cycle) => cycle.verdict === "rolled_back").length)}</Stat>
            <Stat name="Refused" sub="by the gate">{number(cycles.filter((cycle) => cycle.verdict === "refused").length)}</Stat>
            <Stat name="Held-out score" sub="of what is promoted">{figure(promoted.at(-1)?.held_out_after)}</Stat>
            <Stat name="Users are served by" sub={last ? `since cycle ${[...ended].reverse().find((cycle) => cycle.version_before !== cycle.version_after)?.cycle ?? 1}` : undefined}>
              {last ? <>{visible(last.resources_id)}@{versionOf(last, last.version_after)}</> : "–"}</Stat>
            <Stat name="Began" sub={last ? `the last cycle ended ${ago(last.end_time, now)}` : undefined}>{ago(trained.start_time, now)}</Stat>
          </div>
        )}
        {data && <History run={run} cycles={cycles} running={!trained.outcome} />}
        <div className="grid2">
          <section className="card"><Chart title="Held-out score" xName="cycle" series={[line("before", "var(--c2)", (cycle) => cycle.held_out_before), { name: "after", color: "var(--c1)", points: after }]} /></section>
          <section className="card"><Chart title="Mean reward" xName="cycle" series={[line("promoted", "var(--c2)", (cycle) => cycle.canary_promoted_mean), line("canary", "var(--c1)", (cycle) => cycle.canary_mean)]} /></section>
        </div>
      </div>
    </>
  );
}

function History({ run, cycles, running }: { run: string; cycles: Cycle[]; running: boolean }) {
  const [search, setSearch] = useSearchParams();
  const chosen = Number(search.get("cycle"));
  const now = useNow(5000);
  const row = useRef<HTMLTableRowElement>(null);
  useEffect(() => { void row.current?.scrollIntoView({ block: "nearest" }); }, [chosen]); // a promise, in newer browsers
  const choose = (cycle: number) => { const next = new URLSearchParams(search); if (cycle === chosen) next.delete("cycle"); else next.set("cycle", String(cycle)); setSearch(next, { replace: true }); };
  return (
    <section className="card">
      <h2>Cycles <small>the latest first</small></h2>
      {cycles.length === 0 ? <Empty>No cycle has begun yet.</Empty> : (
        <table className="plain cycles" aria-label="Cycles">
          <thead><tr>{COLUMNS.map(([title, look]) => <th key={title} scope="col" className={look}>{title}</th>)}</tr></thead>
          <tbody>
            {[...cycles].reverse().map((cycle) => (
              <Fragment key={cycle.cycle}>
                <tr ref={cycle.cycle === chosen ? row : undefined} className={`${alarms(cycle) ? "alarm" : ""} ${cycle.cycle === chosen ? "chosen" : ""}`}>
                  <td><button aria-expanded={cycle.cycle === chosen} aria-label={`Cycle ${cycle.cycle}`} onClick={() => choose(cycle.cycle)}>{cycle.cycle === chosen ? "▾" : "▸"} {cycle.cycle}</button></td>
                  <td className="wide" title={when(cycle.end_time)}>{cycle.stage ? <span className="dim">since {when(cycle.stage_began ?? cycle.start_time).slice(11, 19)}, told {ago(cycle.end_time, now)}</span> : when(cycle.end_time).slice(0, 16)}</td>
                  <td><Badge kind={cycle.stage ? "running" : cycle.verdict}>{visible(told(cycle)) || "none"}</Badge>
                    {cycle.waits && <div className="small dim">{visible(cycle.waits)}</div>}
                    {cycle.stage && running && now - cycle.end_time > SILENT_SECONDS && <div className="bad">It has told nothing since: does agl-otel improve still run?</div>}
                    {cycle.reasons.map((reason) => <div key={reason.key} className={reason.alarm ? "bad strong" : "small dim"}>{visible(reason.text)}</div>)}</td>
                  <td><HeldOut of={cycle} /></td>
                  <td className="wide"><Gain value={cycle.backtest_gain} verdict={cycle.backtest_verdict} /></td>
                  <td className="wide">{figure(cycle.drift)}</td>
                  <td className="wide"><Canary of={cycle} /></td>
                  <td className="wide"><Versions of={cycle} /></td>
                  <td className="wide"><TrainingRun of={cycle} /></td>
                </tr>
                {cycle.cycle === chosen && <tr><td colSpan={COLUMNS.length}><Details run={run} cycle={cycle} /></td></tr>}
              </Fragment>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}

const HeldOut = ({ of }: { of: Cycle }) => of.held_out_after === null ? <span className="dim">–</span> : (
  <>{figure(of.held_out_before)} → {figure(of.held_out_after)}{of.held_out_gain_low !== null && of.held_out_gain_high !== null && <div className="small dim" title="95 % interval of the gain">[{signed(of.held_out_gain_low)}, {signed(of.held_out_gain_high)}]</div>}</>);

const Gain = ({ value, verdict }: { value: number | null; verdict: string }) => value === null ? <span className="dim">–</span> : (
  <>{signed(value)}<div className={verdict === "worse" ? "small bad" : "small dim"}>{visible(verdict.replace("_", " "))}</div></>);

const Canary = ({ of }: { of: Cycle }) => of.canary_share === null ? <span className="dim">–</span> : (
  <>{figure(of.canary_mean)} against {figure(of.canary_promoted_mean)}<div className="small dim">{number(of.canary_rated)} of {number(of.canary_begun)} rated, {figure(of.canary_share * 100)} %{of.canary_promoted_rated !== null && `, ${number(of.canary_promoted_rated)} rated of the promoted`}</div></>);

const Versions = ({ of }: { of: Cycle }) => of.version_before === of.version_after ? versionOf(of, of.version_after) : <>{versionOf(of, of.version_before)} → {versionOf(of, of.version_after)}</>;

const TrainingRun = ({ of }: { of: Cycle }) => of.training_run ? <Link className="mono tail" title={of.training_run} to={view(of.training_run)}><bdi>{visible(of.training_run)}</bdi></Link> : <span className="dim">–</span>;

function Details({ run, cycle }: { run: string; cycle: Cycle }) {
  const [name, version] = cycle.selection.split("@");
  const facts: (readonly [string, ReactNode])[] = [
    cycle.stage ? ["Began", when(cycle.start_time)] : ["Began, ended", `${when(cycle.start_time)}, ${when(cycle.end_time)}`],
    ["Made by", <TrainingRun of={cycle} />],
    ["Samples", cycle.stage ? "–" : number(cycle.samples)],
    ["Selection", cycle.selection ? <><Link className="mono" to={`/resources/selection-${id(name ?? "")}?version=${id(version ?? "")}`}>{visible(cycle.selection)}</Link> (<Link to={`/review?selection=${id(cycle.selection)}`}>review</Link>)</> : "–"],
    ["Back-test", <Gain value={cycle.backtest_gain} verdict={cycle.backtest_verdict} />],
    ["Back-test by trusted rewards", <Gain value={cycle.trusted_gain} verdict={cycle.trusted_verdict} />],
    ["Drift", figure(cycle.drift)],
    ["Canary", <Canary of={cycle} />],
    ["Version", <Versions of={cycle} />],
    ["Trace", <Mono>{cycle.trace_id}</Mono>],
    ["Span", <Mono>{cycle.span_id}</Mono>],
  ];
  return (
    <div className="grid2">
      <dl className="pairs">{facts.map(([about, value]) => <Fragment key={about}><dt>{about}</dt><dd>{value}</dd></Fragment>)}</dl>
      {cycle.stage ? <p className="dim small">Its {number(cycle.attempts)} attempts are in the selection.</p> : <Attempts run={run} cycle={cycle} />}
    </div>
  );
}

// The attempts of the window; each leads to its page, with what was said of it.
function Attempts({ run, cycle }: { run: string; cycle: Cycle }) {
  const [limit, setLimit] = useState(PAGE);
  const asked = { run, step: cycle.cycle, limit };
  const found = useQuery({ queryKey: ["step-attempts", asked], placeholderData: keepPreviousData, queryFn: ({ signal }) => get<Page<{ rollout_id: string; attempt_id: string }>>("/runs/steps/attempts", asked, signal) });
  const ids = [...new Set((found.data?.items ?? []).map((each) => each.rollout_id))];
  const figures = useQuery({
    queryKey: ["figures", ids], enabled: ids.length > 0, placeholderData: keepPreviousData,
    queryFn: async ({ signal }) => new Map((await post<Figures[]>("/rollouts/figures", { rollout_ids: ids }, signal)).map((each) => [each.rollout_id, each])),
  });
  const total = found.data?.total ?? 0;
  return (
    <div className="window">
      <h3>Learnt from {number(cycle.attempts)} attempts{cycle.unlinked > 0 && `, and ${number(cycle.unlinked)} without spans`}</h3>
      <Problem error={found.error ?? figures.error} />
      <table className="plain" aria-label={`Attempts of cycle ${cycle.cycle}`}><tbody>
        {ids.map((rollout) => <tr key={rollout}><td><RolloutLink id={rollout} /></td><td className="right"><Reward value={figures.data?.get(rollout)?.reward} /></td></tr>)}
      </tbody></table>
      {total > limit && (limit < MOST ? <button className="more" onClick={() => setLimit(Math.min(MOST, limit * 4))}>show more</button>
        : <p className="dim small">The first {number(MOST)}: the selection has all.</p>)}
    </div>
  );
}

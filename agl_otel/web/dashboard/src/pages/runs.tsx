// Runs: which there are, and one of them over its steps.
import { useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { Link, useNavigate, useSearchParams } from "react-router";
import { ApiError, get, type Curve, type CurvePoint, type Run as RunType, type StepLosses, type Training, type Verdicts } from "../api";
import { Badge, Bars, Empty, Head, Problem, Stat, STATUS_ORDER, Tabs, useNow } from "../parts/common";
import { Chart, type Series } from "../parts/chart";
import { Table, type Column } from "../parts/table";
import { useSettings } from "../settings";
import { ago, duration, figure, number, short, visible, when } from "../text";
import { Improvement } from "./improve";
import { Reward } from "./rollouts";

const COLORS: Record<string, string> = { train: "var(--c1)", val: "var(--c2)", test: "var(--c3)", production: "var(--c4)", "": "var(--c1)" };
const statuses = (run: RunType) => STATUS_ORDER.map((status) => [status, run.by_status[status] ?? 0] as const);
const ended = (run: RunType) => (run.by_status.succeeded ?? 0) + (run.by_status.failed ?? 0) + (run.by_status.cancelled ?? 0);
const nameOf = (run: RunType) => (run.run_id ? visible(run.run_id) : "without a run");
const open = (run: string) => `/runs/view?run=${encodeURIComponent(run)}`;

export function Runs() {
  const { refreshMs } = useSettings();
  const now = useNow(5000);
  const go = useNavigate();
  const { data, error } = useQuery({ queryKey: ["runs"], queryFn: ({ signal }) => get<RunType[]>("/runs", {}, signal), refetchInterval: refreshMs || false });
  const training = useQuery({ queryKey: ["training"], queryFn: ({ signal }) => get<Training[]>("/runs/training", {}, signal), refetchInterval: refreshMs ? refreshMs * 4 : false });
  const trained = useMemo(() => new Map((training.data ?? []).map((each) => [each.run_id, each])), [training.data]);
  const [wanted, want] = useState("");
  const runs = useMemo(() => {
    const known = new Set((data ?? []).map((run) => run.run_id));
    const all = [...(data ?? []), ...(training.data ?? []).filter((each) => !known.has(each.run_id)).map(withoutRollouts)].sort((a, b) => b.start_time - a.start_time);
    return all.filter((run) => run.run_id.toLowerCase().includes(wanted.toLowerCase()));
  }, [data, training.data, wanted]);
  const columns: Column<RunType>[] = [
    { key: "run", title: "Run", width: "minmax(120px, 2fr)", cell: (run) => <Link to={open(run.run_id)} className="strong">{nameOf(run)}</Link> },
    { key: "status", title: "Rollouts by status", width: "minmax(160px, 1.4fr)", wide: true, cell: (run) => <Bars small parts={statuses(run)} total={run.rollouts} /> },
    { key: "rollouts", title: "Rollouts", width: "78px", right: true, cell: (run) => number(run.rollouts) },
    { key: "reward", title: "Reward", width: "minmax(112px, 0.6fr)", right: true, cell: (run) => run.rollouts ? <RunReward run={run} /> : <span className="dim">–</span> },
    { key: "ended", title: "Ended", width: "66px", right: true, wide: true, cell: (run) => run.rollouts ? `${Math.floor((100 * ended(run)) / run.rollouts)} %` : "–" },
    { key: "failed", title: "Failed", width: "66px", right: true, wide: true, cell: (run) => <span className={run.by_status.failed ? "bad" : "dim"}>{number(run.by_status.failed ?? 0)}</span> },
    { key: "step", title: "Steps", width: "66px", right: true, wide: true, cell: (run) => trained.get(run.run_id)?.steps ?? run.last_step ?? "–" },
    { key: "outcome", title: "Outcome", width: "130px", wide: true, cell: (run) => <Outcome of={trained.get(run.run_id)} /> },
    { key: "modes", title: "Modes", width: "minmax(120px, 1fr)", wide: true, cell: (run) => <span className="dim">{Object.entries(run.by_mode).map(([mode, count]) => `${mode || "none"} ${short(count)}`).join(" · ")}</span> },
    { key: "start", title: "Began", width: "100px", wide: true, cell: (run) => <span title={when(run.start_time)}>{ago(run.start_time, now)}</span> },
  ];
  return (
    <>
      <Head title="Runs">
        <input type="search" placeholder="Search runs" aria-label="Search runs" value={wanted} onChange={(event) => want(event.target.value)} />
      </Head>
      <Problem error={error ?? training.error} />
      {data && (
        <Table label="Runs" columns={columns} count={runs.length} row={(index) => runs[index]} onOpen={(run) => void go(open(run.run_id))} rowHeight={38}
          empty={<Empty>No runs yet. A run is what a rollout's metadata names as <code>run</code>, else the set of resources it runs with.</Empty>} />
      )}
    </>
  );
}

// A run that has trained on rollouts of others, and enqueued none.
const withoutRollouts = (each: Training): RunType => (
  { run_id: each.run_id, rollouts: 0, by_status: {}, by_mode: {}, attempts: 0, start_time: each.start_time, end_time: each.end_time, last_step: null });

// How a training run ended, in a word; of `improve` also how many cycles were promoted.
function Outcome({ of }: { of: Training | undefined }) {
  const word = of?.outcome.split(":")[0] ?? "";
  const promoted = of?.algorithm === "improve" && of.steps ? `${number(of.promoted)} of ${number(of.steps)} promoted` : "";
  return <span className={word === "error" ? "bad" : "dim"} title={visible(of?.outcome ?? "")}>{[word, promoted].filter(Boolean).join(", ")}</span>;
}

const rewardsOf = (points: CurvePoint[]) => {
  const rewarded = points.filter((point) => point.made && point.reward_mean !== null);
  const trained = rewarded.filter((point) => point.mode === "train");
  return trained.length ? trained : rewarded;
};

// The mean rewards of the first and the last step.
function RunReward({ run }: { run: RunType }) {
  const { refreshMs } = useSettings();
  const { data, isPending } = useQuery({ queryKey: ["curve", run.run_id], queryFn: ({ signal }) => get<Curve>("/runs/curve", { run: run.run_id }, signal), staleTime: 15_000,
    refetchInterval: (query) => refreshMs && (!query.state.data || ended(run) < run.rollouts) ? refreshMs * 4 : false });
  if (isPending) return <span className="dim">…</span>;
  const points = rewardsOf(data?.points ?? []);
  const first = points[0], last = points.at(-1);
  return <>{first && first !== last && <span className="dim" title={`${data!.by} ${first.step}`}>{figure(first.reward_mean)} → </span>}<Reward value={last?.reward_mean} /></>;
}

// Curves of the steps that were made.
function lines(all: CurvePoint[], read: (point: CurvePoint) => Omit<Series["points"][number], "x"> | null): Series[] {
  const points = all.filter((point) => point.made);
  const modes = [...new Set(points.map((point) => point.mode))];
  return modes.map((mode) => ({
    name: mode, color: COLORS[mode] ?? "var(--c4)",
    points: points.filter((point) => point.mode === mode).flatMap((point) => { const found = read(point); return found ? [{ x: point.step, ...found }] : []; }),
  })).filter((each) => each.points.length);
}

export function Run() {
  const [search] = useSearchParams();
  const run = search.get("run") ?? "";
  const training = useTraining(run);
  const trained = training.data?.[0];
  if (training.isLoading) return <Head trail={<Link to="/runs">Runs</Link>} title={<span> / {visible(run)}</span>} />;
  return trained?.algorithm === "improve" ? <Improvement run={run} trained={trained} /> : <Rewards run={run} />;
}

function useTraining(run: string) {
  const { refreshMs } = useSettings();
  return useQuery({ queryKey: ["training", run], queryFn: ({ signal }) => get<Training[]>("/runs/training", { run }, signal), enabled: !!run, refetchInterval: refreshMs ? refreshMs * 4 : false });
}

function Rewards({ run }: { run: string }) {
  const { refreshMs, promptPrice, responsePrice } = useSettings();
  const now = useNow(5000);
  const [band, setBand] = useState<"std" | "range">("std");
  const curve = useQuery({ queryKey: ["curve", run], queryFn: ({ signal }) => get<Curve>("/runs/curve", { run }, signal), refetchInterval: refreshMs || false });
  const verdicts = useQuery({ queryKey: ["verdicts", run], queryFn: ({ signal }) => get<Verdicts>("/runs/verdicts", { run }, signal), refetchInterval: refreshMs ? refreshMs * 2 : false });
  const steps = useQuery({ queryKey: ["steps", run], queryFn: ({ signal }) => get<StepLosses[]>("/runs/steps", { run }, signal), refetchInterval: refreshMs ? refreshMs * 4 : false });
  const training = useTraining(run);
  const trained = training.data?.[0];
  const without = trained && curve.error instanceof ApiError && curve.error.status === 404; // it enqueued no rollouts
  const points = curve.data?.points ?? [];
  const about = curve.data?.run;
  const sum = (read: (point: CurvePoint) => number) => points.reduce((total, point) => total + read(point), 0);
  const last = rewardsOf(points).at(-1);
  const xName = curve.data?.by === "order" ? "part" : "step";
  const reward = useMemo(() => lines(points, (point) => point.reward_mean === null ? null : {
    y: point.reward_mean, note: `${point.rewarded} of ${point.rollouts}`,
    low: band === "std" ? point.reward_mean - (point.reward_std ?? 0) : point.reward_min!, high: band === "std" ? point.reward_mean + (point.reward_std ?? 0) : point.reward_max!,
  }), [points, band]);
  const cost = useMemo(() => lines(points, (point) => point.ended ? { y: point.prompt_tokens + point.response_tokens, note: `${short(point.prompt_tokens)} + ${short(point.response_tokens)}` } : null), [points]);
  const length = useMemo(() => lines(points, (point) => point.ended ? { y: point.response_tokens / point.ended } : null), [points]);
  const failed = useMemo(() => lines(points, (point) => point.ended ? { y: point.errors / point.rollouts } : null), [points]);
  return (
    <>
      <Head trail={<Link to="/runs">Runs</Link>} title={<span> / {run ? visible(run) : "without a run"}</span>}>
        <Link className="button" to={`/rollouts?run=${encodeURIComponent(run)}`}>Rollouts of this run</Link>
      </Head>
      <Problem error={(without ? null : curve.error) ?? verdicts.error ?? steps.error ?? training.error} />
      <div className="scroll">
        {trained && trained.outcome.startsWith("error") && <p className="problem" role="alert">The run ended with an {visible(trained.outcome)}</p>}
        {about && (
          <div className="stats">
            <Stat name="Rollouts" sub={`${number(ended(about))} ended, ${number(about.attempts)} attempts`}>{number(about.rollouts)}</Stat>
            <Stat name="Reward, last step" sub={last ? `± ${figure(last.reward_std)}, ${last.mode || "no mode"}` : undefined}>{figure(last?.reward_mean)}</Stat>
            <Stat name="Steps" sub={trained ? trained.outcome.split(":")[0] || undefined : curve.data?.by === "order" ? "rollouts name no steps" : undefined}>
              {trained?.steps ?? about.last_step ?? "–"}</Stat>
            <Stat name="Tokens" sub={`${short(sum((p) => p.prompt_tokens))} read, ${short(sum((p) => p.response_tokens))} written`}>{short(sum((p) => p.prompt_tokens + p.response_tokens))}</Stat>
            {(promptPrice !== null || responsePrice !== null) && <Stat name="Cost" sub="at the prices of /settings">
              {figure((sum((p) => p.prompt_tokens) * (promptPrice ?? 0) + sum((p) => p.response_tokens) * (responsePrice ?? 0)) / 1e6)}</Stat>}
            <Stat name="Spans" sub={`${number(sum((p) => p.errors))} with errors`}>{short(sum((p) => p.spans))}</Stat>
            <Stat name="Began" sub={about.end_time ? `${duration(about.end_time - about.start_time)} until the last end` : "nothing ended yet"}>{ago(about.start_time, now)}</Stat>
          </div>
        )}
        {about && <section className="card"><h2>Rollouts by status</h2><Bars parts={statuses(about)} total={about.rollouts} />
          <p className="legend">{statuses(about).filter(([, count]) => count).map(([status, count]) => <span key={status}><i className={status} />{status} {number(count)}</span>)}</p></section>}
        <div className="grid2">
          <section className="card">
            <div className="corner"><Tabs names={[["std", "± std"], ["range", "min – max"]]} chosen={band} choose={setBand} /></div>
            {curve.isPending ? <div className="wait" /> : <Chart title="Reward" series={reward} xName={xName} height={240} />}
          </section>
          <section className="card">
            <h2>Verdicts <small>of the {verdicts.data ? number(verdicts.data.of) : ""} rollouts that ended last</small></h2>
            {verdicts.data && verdicts.data.of > 0 ? <VerdictCard found={verdicts.data} /> : verdicts.isPending ? <div className="wait" /> : <Empty>No rollout has ended.</Empty>}
          </section>
          {steps.data && steps.data.length > 0 && <LossCard steps={steps.data} />}
          <section className="card">{curve.isPending ? <div className="wait" /> : <Chart title={`Tokens a ${xName}`} series={cost} xName={xName} zero />}</section>
          <section className="card">{curve.isPending ? <div className="wait" /> : <Chart title="Written tokens a rollout" series={length} xName={xName} zero />}</section>
          <section className="card">{curve.isPending ? <div className="wait" /> : <Chart title="Spans with errors a rollout" series={failed} xName={xName} zero />}</section>
        </div>
      </div>
    </>
  );
}

const SHOWN_STEPS = 20;

function LossCard({ steps }: { steps: StepLosses[] }) {
  const lost = steps.filter((step) => step.lost);
  const shown = steps.filter((step) => step.lost || step.replies_cut);
  const other = steps.filter((step) => step.other_code);
  const [firstOther, lastOther] = [other[0], other[other.length - 1]];
  return (
    <section className="card">
      <h2>What steps lost <small>in {number(lost.length)} of {number(steps.length)} steps</small></h2>
      {firstOther && lastOther ? <p className="bad">Since step {number(firstOther.step)} with other code than the run was begun with: {visible(lastOther.other_code)}</p> : null}
      {shown.length ? <table className="plain"><tbody>
        {shown.slice(-SHOWN_STEPS).reverse().map((step) => (
          <tr key={step.step}><td className="right">{number(step.step)}</td><td className={step.rollouts_without_sample > step.rollouts / 5 ? "bad" : "dim"}>{visible(step.lost)}</td><td className="dim">{step.replies_cut ? `${number(step.replies_cut)} cut at max_tokens, and trained on` : ""}</td></tr>
        ))}
      </tbody></table> : <Empty>Every rollout gave a sample, and no reply was cut.</Empty>}
    </section>
  );
}

function VerdictCard({ found }: { found: Verdicts }) {
  const parts = (["complete", "unproven", "incomplete", "empty"] as const).map((kind) => [kind, found.counts[kind] ?? 0] as const);
  return (
    <>
      <Bars parts={parts} total={found.of} />
      <table className="plain">
        <tbody>
          {parts.map(([kind, count]) => (
            <tr key={kind}><td><Badge kind={kind} /></td><td className="right">{number(count)}</td><td className="right dim">{((100 * count) / found.of).toFixed(1)} %</td><td className="dim">{MEANING[kind]}</td></tr>
          ))}
        </tbody>
      </table>
      {found.alarms > 0 && <p className="problem">{found.alarms} are unproven though their agents ran under the hook.</p>}
      {found.missing > 0 && <p className="bad small">{number(found.missing)} spans or calls are missing.</p>}
      {Object.entries(found.reasons).map(([reason, count]) => <p key={reason} className="small dim">{count} × {visible(reason)}</p>)}
    </>
  );
}

const MEANING = { complete: "every span that was counted is stored", unproven: "nobody counted its spans", incomplete: "spans or calls are missing", empty: "no span of an agent" } as const;

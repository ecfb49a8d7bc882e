// Resources: sets with their versions, and what changed between two of them.
import { useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { Link, useNavigate, useParams, useSearchParams } from "react-router";
import { get, id, type Page, type PublishingStep, type Resources as Set_ } from "../api";
import { Empty, Head, Json, Problem, Short, Tabs, useLater, useNow } from "../parts/common";
import { diff } from "../parts/diff";
import { Table, type Column, type Sort } from "../parts/table";
import { useSettings } from "../settings";
import { ago, masked, number, visible, when } from "../text";

const LIMIT = 1000;

export function Resources() {
  const { refreshMs } = useSettings();
  const now = useNow(5000);
  const go = useNavigate();
  const [text, setText] = useState("");
  const wanted = useLater(text.trim());
  const [sort, setSort] = useState<Sort>({ by: "update_time", desc: true });
  const asked = { resources_id_contains: wanted || undefined, sort_by: sort.by, sort_order: sort.desc ? "desc" : "asc", limit: LIMIT };
  const { data, error } = useQuery({ queryKey: ["resources", asked], queryFn: ({ signal }) => get<Page<Set_>>("/resources", asked, signal), refetchInterval: refreshMs || false, placeholderData: (before) => before });
  const columns: Column<Set_>[] = [
    { key: "id", title: "Resources", width: "minmax(120px, 1fr)", sort: "resources_id", cell: (set) => <Link className="mono" to={`/resources/${id(set.resources_id)}`}>{visible(set.resources_id)}</Link> },
    { key: "version", title: "Version", width: "80px", right: true, sort: "version", cell: (set) => set.version },
    { key: "count", title: "Count", width: "70px", right: true, wide: true, cell: (set) => Object.keys(set.resources).length },
    { key: "preview", title: "Preview", width: "minmax(240px, 2.4fr)", wide: true, cell: (set) => <Short value={masked(set.resources)} width={300} /> },
    { key: "created", title: "Created", width: "120px", wide: true, sort: "create_time", cell: (set) => <span title={when(set.create_time)}>{ago(set.create_time, now)}</span> },
    { key: "updated", title: "Updated", width: "100px", sort: "update_time", cell: (set) => <span title={when(set.update_time)}>{ago(set.update_time, now)}</span> },
  ];
  return (
    <>
      <Head title="Resources"><span className="count">{number(data?.total)}</span>
        <input type="search" placeholder="Search by id" aria-label="Search by id" value={text} onChange={(event) => setText(event.target.value)} /></Head>
      <Problem error={error} />
      {data && <Table label="Resources" columns={columns} count={data.items.length} row={(index) => data.items[index]} sort={sort} onSort={setSort} onOpen={(set) => void go(`/resources/${id(set.resources_id)}`)}
        empty={<Empty>No resources yet: prompts and model addresses that algorithms publish stand here.</Empty>} />}
    </>
  );
}

const textOf = (set: Set_ | undefined): string => {
  if (!set) return "";
  return Object.entries(set.resources).map(([name, value]) => {
    const { template, ...rest } = masked(value) as Record<string, unknown>;
    return `${name}: ${JSON.stringify(rest, null, 2)}${typeof template === "string" ? `\n\n${template}` : ""}`;
  }).join("\n\n");
};

// By which step of a training run, or cycle of `improve`, a version was published.
function Published({ set, steps }: { set: Set_; steps: PublishingStep[] }) {
  const by = steps.find((step) => Number(step.version_before) < set.version && set.version <= Number(step.version_after));
  if (!by) return null;
  const cycle = by.algorithm === "improve";
  const canary = Object.entries(set.resources).find(([, resource]) => typeof resource.share === "number");
  return (
    <p className="small">Published by <Link to={`/runs/view?run=${id(by.run_id)}${cycle ? `&cycle=${by.step}` : ""}`}>{cycle ? "cycle" : "step"} {by.step} of {visible(by.run_id)}</Link>
      {canary && `, with ${visible(canary[0])}`}{by.verdict && <>, which was <b>{visible(by.verdict.replace("_", " "))}</b></>}</p>
  );
}

export function ResourceVersions() {
  const { resourcesId = "" } = useParams();
  const [search, setSearch] = useSearchParams();
  const [view, setView] = useState<"diff" | "text" | "json">("diff");
  const now = useNow(5000);
  const asked = { sort_by: "version", sort_order: "desc", limit: LIMIT };
  const { data, error } = useQuery({ queryKey: ["versions", resourcesId], queryFn: ({ signal }) => get<Page<Set_>>(`/resources/${id(resourcesId)}/versions`, asked, signal) });
  const steps = useQuery({ queryKey: ["publishing", resourcesId], queryFn: ({ signal }) => get<PublishingStep[]>("/runs/steps/publishing", { resources_id: resourcesId }, signal) });
  const versions = data?.items ?? [];
  const chosen = Number(search.get("version")) || versions[0]?.version;
  const against = Number(search.get("against")) || (chosen ?? 1) - 1;
  const set = versions.find((each) => each.version === chosen), before = versions.find((each) => each.version === against);
  const lines = useMemo(() => diff(textOf(before), textOf(set)), [set, before]);
  const choose = (name: string, value: number) => { const next = new URLSearchParams(search); next.set(name, String(value)); if (name === "version") next.delete("against"); setSearch(next, { replace: true }); };
  return (
    <>
      <Head trail={<Link to="/resources">Resources</Link>} title={<span> / <span className="mono">{visible(resourcesId)}</span></span>}>
        <Link className="button" to={`/rollouts?run=${id(resourcesId)}`}>Rollouts</Link>
      </Head>
      <Problem error={error ?? steps.error} />
      {set && (
        <div className="split">
          <div className="versions" role="listbox" aria-label="Versions">
            {versions.map((each) => (
              <button key={each.version} role="option" aria-selected={each.version === chosen} className={each.version === chosen ? "on" : each.version === against ? "against" : ""}
                onClick={(event) => choose(event.shiftKey ? "against" : "version", each.version)}>
                <b>v{each.version}</b><span title={when(each.update_time)}>{ago(each.update_time, now)}</span>
              </button>
            ))}
          </div>
          <div className="scroll">
            <div className="line">
              <Tabs names={[["diff", before ? `Changes since v${against}` : "Changes"], ["text", "Text"], ["json", "JSON"]]} chosen={view} choose={setView} />
              {versions.length > 1 && <label className="dim small">compare with <select value={against} onChange={(event) => choose("against", Number(event.target.value))}>
                {versions.filter((each) => each.version !== chosen).map((each) => <option key={each.version} value={each.version}>v{each.version}</option>)}</select></label>}
            </div>
            <Published set={set} steps={steps.data ?? []} />
            {view === "json" ? <Json value={masked(set)} height={4000} /> : view === "text" ? <Json value={textOf(set)} height={4000} /> : (
              <div className="diff mono" role="table" aria-label="Changes">
                {!before && <p className="dim">This is the first version: all of it is new.</p>}
                {before && lines.every((each) => each.kind === " ") && <p className="dim">Nothing changed.</p>}
                {lines.map((each, place) => <div key={place} className={each.kind === "+" ? "add" : each.kind === "-" ? "del" : ""}><i>{each.kind}</i>{visible(each.text) || " "}</div>)}
              </div>
            )}
          </div>
        </div>
      )}
    </>
  );
}

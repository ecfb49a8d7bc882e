// Parts of the review page: the labels, the keys, the form of a rubric, and how far reviewers agree.
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useEffect, useRef, useState, type FormEvent } from "react";
import { get, post, type Agreement as AgreementType, type Agreements, type Rubric } from "../api";
import { figure, number, visible } from "../text";
import { Problem } from "./common";

const EXAMPLE = "Does the answer do what was asked?\n\ngood = 1\nnot sure =\nbad = 0\n";

export function Labels({ rubric, chosen, disabled, choose }: { rubric: Rubric; chosen?: string; disabled: boolean; choose: (label: string) => void }) {
  return (
    <div className="labels" role="group" aria-label="Labels">
      {rubric.labels.map(({ label, value }, place) => (
        <button key={label} disabled={disabled} aria-pressed={label === chosen} aria-keyshortcuts={String(place + 1)} title={value === null ? "no reward" : `reward ${value}`}
          className={label === chosen ? "on" : ""} onClick={() => choose(label)}><kbd>{place + 1}</kbd> {visible(label)}</button>
      ))}
    </div>
  );
}

export function Help({ rubric, close }: { rubric: Rubric; close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  const keys = [
    ...rubric.labels.map(({ label }, place) => [String(place + 1), `store “${label}”, and go on`]),
    ["j", "next"], ["k", "back"], ["u", "go back to the last one that was stored, to answer again"], ["c", "comment"], ["e", "what it should have answered"],
    ["t", "tokens and log-probs of every call"], ["r", "send again what was not stored"], ["Esc", "from a field back to the keys"], ["?", "these keys"],
  ];
  return (
    <dialog ref={dialog} onClose={close} aria-labelledby="keys">
      <h2 id="keys">Keys</h2>
      <dl className="keys">{keys.map(([key, what]) => [<dt key={key}><kbd>{key}</kbd></dt>, <dd key={`${key} `}>{visible(what ?? "")}</dd>])}</dl>
      <p className="dim">The arrows scroll the conversation. An answer is stored when the page goes on. You may write a comment and a correction before you answer.</p>
      <button onClick={() => dialog.current?.close()} autoFocus>Close</button>
    </dialog>
  );
}

export function RubricForm({ rubric, onStored }: { rubric?: Rubric; onStored: (stored: Rubric) => void }) {
  const [name, setName] = useState(rubric?.name ?? "");
  const [text, setText] = useState(rubric?.text ?? EXAMPLE);
  const [error, setError] = useState<unknown>();
  const client = useQueryClient();
  async function store(event: FormEvent) {
    event.preventDefault();
    try {
      const stored = await post<Rubric>("/reviews/rubrics", { name, text });
      setError(undefined);
      await client.invalidateQueries({ queryKey: ["rubrics"] });
      onStored(stored);
    } catch (refused) {
      setError(refused);
    }
  }
  return (
    <form className="rubric" onSubmit={(event) => void store(event)}>
      <label className="field">Name<input required value={name} onChange={(event) => setName(event.target.value)} /></label>
      <label className="field">Question and labels<textarea rows={8} value={text} onChange={(event) => setText(event.target.value)} /></label>
      <p className="dim small">A line <code>label = reward</code> is a label; without a number it gives no reward. Labels have the keys 1 to 9. Another text is another version, and each is reviewed anew.</p>
      <Problem error={error} />
      <button>Store the rubric</button>
    </form>
  );
}

export function Agreement({ rubric }: { rubric: string }) {
  const [open, setOpen] = useState(false);
  const { data, error } = useQuery({ queryKey: ["agreement", rubric], enabled: open, queryFn: ({ signal }) => get<Agreements>("/reviews/agreement", { rubric }, signal) });
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Agreement of reviewers</summary>
      <Problem error={error} />
      {data && data.pairs.length === 0 && <p className="dim small">It takes two reviewers: {data.reviewers.length ? `so far there is ${visible(data.reviewers[0]!.reviewer)}` : "so far there is none"}.</p>}
      {data?.pairs.map((pair) => <Pair key={pair.reviewers.join("\n")} pair={pair} />)}
    </details>
  );
}

function Pair({ pair }: { pair: AgreementType }) {
  const [first, second] = pair.reviewers.map(visible);
  return (
    <section className="pair">
      <p><b>{first}</b> and <b>{second}</b>: {pair.kappa === null ? <span className="warn">cannot tell: {pair.undefined}</span> : <>Cohen’s kappa <b>{figure(pair.kappa)}</b></>}, n = {number(pair.n)}</p>
      {pair.n > 0 && <table className="counts">
        <thead><tr><th scope="col">{first} ↓ {second} →</th>{pair.labels.map((label) => <th key={label} scope="col">{visible(label)}</th>)}</tr></thead>
        <tbody>{pair.labels.map((label, row) => <tr key={label}><th scope="row">{visible(label)}</th>{pair.counts[row]!.map((count, column) => <td key={column} className={row === column ? "same" : ""}>{number(count)}</td>)}</tr>)}</tbody>
      </table>}
    </section>
  );
}

// Token ids, coloured by the log-prob under which they were sampled: pale is certain, strong is a surprise.
import { useState } from "react";
import type { Tokens } from "../api";
import { figure, number } from "../text";

const STEP = 2000;
const strength = (logprob: number): number => Math.min(9, Math.floor(-logprob * 2.5));

export function TokenView({ tokens }: { tokens: Tokens }) {
  const logprobs = tokens.logprobs;
  const mean = logprobs?.length ? logprobs.reduce((sum, each) => sum + each, 0) / logprobs.length : null;
  const lowest = logprobs?.length ? logprobs.reduce((low, each) => Math.min(low, each), 0) : null;
  return (
    <div>
      <p className="small dim">
        {number(tokens.prompt_token_ids.length)} read, {number(tokens.response_token_ids.length)} written
        {mean !== null && <> · mean log-prob {figure(mean)} · lowest {figure(lowest)} · perplexity {figure(Math.exp(-mean))}</>}
        {!logprobs && " · no log-probs were recorded"}
      </p>
      {logprobs && <p className="scale" aria-hidden="true">{[0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map((each) => <i key={each} className={`lp lp${each}`} />)}<span>p = 1 … p ≤ 0.03</span></p>}
      <Ids title="Written" ids={tokens.response_token_ids} logprobs={logprobs} />
      <Ids title="Read" ids={tokens.prompt_token_ids} logprobs={null} folded />
    </div>
  );
}

function Ids({ title, ids, logprobs, folded }: { title: string; ids: number[]; logprobs: number[] | null; folded?: boolean }) {
  const [count, setCount] = useState(folded ? 100 : STEP);
  return (
    <>
      <h4>{title}</h4>
      <div className="ids mono">
        {ids.slice(0, count).map((token, place) => {
          const logprob = logprobs?.[place];
          return logprob === undefined ? <span key={place}>{token}</span>
            : <span key={place} className={`lp lp${strength(logprob)}`} title={`#${place}  log-prob ${logprob.toFixed(4)}  p ${Math.exp(logprob).toPrecision(3)}`}>{token}</span>;
        })}
        {ids.length > count && <button className="more" onClick={() => setCount(count + STEP)}>… {number(ids.length - count)} more</button>}
      </div>
    </>
  );
}

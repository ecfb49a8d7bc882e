// A line chart in SVG: lines with bands, axes with round numbers, a reading under the pointer.
import { useEffect, useId, useRef, useState } from "react";
import { figure, short } from "../text";

export type Point = { x: number; y: number; low?: number; high?: number; note?: string };
export type Series = { name: string; color: string; points: Point[] };
const LEFT = 46, RIGHT = 12, TOP = 10, BOTTOM = 24;

function ticks(low: number, high: number, about: number, whole = false): number[] {
  const span = high - low || 1;
  const rough = span / about;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((each) => each * size).find((each) => each >= rough && (!whole || each >= 1)) ?? Math.max(rough, whole ? 1 : 0);
  const found: number[] = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step) found.push(Number(tick.toPrecision(12)));
  return found;
}

export function Chart({ title, series, height = 220, xName = "step", zero }: { title: string; series: Series[]; height?: number; xName?: string; zero?: boolean }) {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(600);
  const [at, setAt] = useState<number | null>(null);
  const clip = useId();
  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => entry && setWidth(Math.max(200, entry.contentRect.width)));
    if (box.current) watcher.observe(box.current);
    return () => watcher.disconnect();
  }, []);
  const all = series.flatMap((each) => each.points);
  const xs = all.map((point) => point.x);
  const ys = all.flatMap((point) => [point.low ?? point.y, point.high ?? point.y]);
  const x0 = Math.min(...xs), x1 = Math.max(...xs);
  let y0 = zero ? 0 : Math.min(...ys), y1 = Math.max(...ys);
  if (zero && y1 === 0) y1 = 1;
  const pad = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
  y0 = zero ? 0 : y0 - pad;
  y1 += pad;
  const x = (value: number) => LEFT + (x1 === x0 ? 0.5 : (value - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
  const y = (value: number) => TOP + (1 - (value - y0) / (y1 - y0 || 1)) * (height - TOP - BOTTOM);
  const line = (points: Point[]) => points.map((point, n) => `${n ? "L" : "M"}${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`).join("");
  const band = (points: Point[]) => {
    const up = points.map((point, n) => `${n ? "L" : "M"}${x(point.x).toFixed(1)} ${y(point.high ?? point.y).toFixed(1)}`).join("");
    return up + [...points].reverse().map((point) => `L${x(point.x).toFixed(1)} ${y(point.low ?? point.y).toFixed(1)}`).join("") + "Z";
  };
  const steps = [...new Set(xs)].sort((a, b) => a - b);
  function move(event: React.PointerEvent) {
    const bounds = event.currentTarget.getBoundingClientRect();
    const wanted = x0 + ((event.clientX - bounds.left - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
    setAt(steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), steps[0] ?? 0));
  }
  const read = at === null ? [] : series.flatMap((each) => each.points.filter((point) => point.x === at).map((point) => ({ ...each, point })));
  return (
    <figure className="chart" ref={box}>
      <figcaption>
        <span>{title}</span>
        <span className="legend">{series.map((each) => <span key={each.name}><i style={{ background: each.color }} />{each.name || "all"}</span>)}</span>
      </figcaption>
      {all.length === 0 ? <p className="empty">Nothing yet.</p> : (
        <div className="plot">
          <svg width={width} height={height} role="img" aria-label={`${title}: ${series.map((each) => `${each.name} last ${figure(each.points.at(-1)?.y)}`).join(", ")}`}
            onPointerMove={move} onPointerLeave={() => setAt(null)}>
            <clipPath id={clip}><rect x={LEFT - 5} y={0} width={width - LEFT - RIGHT + 10} height={height - BOTTOM} /></clipPath>
            {ticks(y0, y1, 4).map((tick) => (
              <g key={tick}><line className="grid" x1={LEFT} x2={width - RIGHT} y1={y(tick)} y2={y(tick)} /><text x={LEFT - 7} y={y(tick) + 3.5} textAnchor="end">{Math.abs(tick) >= 10000 ? short(tick) : figure(tick)}</text></g>
            ))}
            {ticks(x0, x1, Math.max(2, width / 110), true).map((tick) => <text key={tick} x={x(tick)} y={height - 7} textAnchor="middle">{figure(tick)}</text>)}
            <g clipPath={`url(#${clip})`}>
              {series.map((each) => each.points.some((point) => point.low !== undefined) && <path key={each.name} d={band(each.points)} fill={each.color} opacity={0.13} />)}
              {series.map((each) => <path key={each.name} d={line(each.points)} fill="none" stroke={each.color} strokeWidth={1.8} strokeLinejoin="round" />)}
              {series.map((each) => each.points.length < 60 && each.points.map((point) => <circle key={`${each.name}${point.x}`} cx={x(point.x)} cy={y(point.y)} r={each.points.length < 25 ? 2.6 : 1.6} fill={each.color} />))}
            </g>
            {at !== null && <line className="cursor" x1={x(at)} x2={x(at)} y1={TOP} y2={height - BOTTOM} />}
            {read.map(({ name, color, point }) => <circle key={name} cx={x(point.x)} cy={y(point.y)} r={4} fill={color} />)}
          </svg>
          {at !== null && (
            <div className="tip" style={{ left: Math.min(x(at) + 12, width - 170) }}>
              <b>{xName} {at}</b>
              {read.map(({ name, color, point }) => <span key={name}><i style={{ background: color }} />{name || "all"} <b>{figure(point.y)}</b>{point.note && <em>{point.note}</em>}</span>)}
            </div>
          )}
        </div>
      )}
    </figure>
  );
}

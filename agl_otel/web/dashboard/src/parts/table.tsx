// A table of any length: only the rows that are seen are drawn. Arrow keys move, Enter opens.
// A row is drawn again where its data or the columns changed: a page whose columns stay the same answers a click before its rows are drawn.
import { useVirtualizer } from "@tanstack/react-virtual";
import { memo, useCallback, useEffect, useMemo, useRef, useState, type KeyboardEvent, type ReactNode } from "react";
import { useNarrow } from "./common";

// `wide`: left out in a narrow window.
export type Column<T> = { key: string; title: ReactNode; width: string; right?: boolean; wide?: boolean; sort?: string; cell: (row: T, index: number) => ReactNode };
export type Sort = { by: string; desc: boolean };

type Props<T> = {
  columns: Column<T>[];
  count: number;
  row: (index: number) => T | undefined;
  onRange?: (first: number, last: number) => void;
  onOpen?: (row: T, index: number) => void;
  below?: (row: T, index: number) => ReactNode;
  sort?: Sort;
  onSort?: (sort: Sort) => void;
  rowHeight?: number;
  label: string;
  chosen?: (row: T) => boolean;
  empty?: ReactNode;
};

type RowProps<T> = {
  columns: Column<T>[];
  data: T | undefined;
  index: number;
  look: string;
  template: string;
  height: number;
  press: (index: number, target: HTMLElement) => void;
};

const Row = memo(function Row<T>({ columns, data, index, look, template, height, press }: RowProps<T>) {
  return (
    <div role="row" aria-rowindex={index + 1} style={{ gridTemplateColumns: template, minHeight: height }} className={look}
      onClick={(event) => press(index, event.target as HTMLElement)}>
      {data === undefined
        ? <div role="cell" className="ghost" />
        : columns.map((column) => <div key={column.key} role="cell" className={column.right ? "right" : ""}>{column.cell(data, index)}</div>)}
    </div>
  );
}) as <T>(props: RowProps<T>) => ReactNode;

export function Table<T>({ columns: given, count, row, onRange, onOpen, below, sort, onSort, rowHeight = 32, label, chosen, empty }: Props<T>) {
  const frame = useRef<HTMLDivElement>(null);
  const narrow = useNarrow();
  const columns = useMemo(() => given.filter((column) => !(narrow && column.wide)), [given, narrow]);
  const [at, setAt] = useState(-1);
  const list = useVirtualizer({ count, getScrollElement: () => frame.current, estimateSize: () => rowHeight, overscan: 12 });
  const shown = list.getVirtualItems();
  const first = shown[0]?.index ?? 0;
  const last = shown[shown.length - 1]?.index ?? 0;
  useEffect(() => onRange?.(first, last), [first, last, onRange]);
  const template = columns.map((column) => column.width).join(" ");

  const open = useRef((_: number) => {});
  open.current = (index) => {
    const data = row(index);
    if (data !== undefined) onOpen?.(data, index);
  };
  const press = useCallback((index: number, target: HTMLElement) => {
    setAt(index);
    if (!target.closest("a,button")) open.current(index);
  }, []);

  function keys(event: KeyboardEvent) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -count, End: count }[event.key];
    if (step !== undefined) {
      const next = Math.max(0, Math.min(count - 1, at + step));
      setAt(next);
      list.scrollToIndex(next);
      event.preventDefault();
    } else if (event.key === "Enter" && event.target === frame.current && at >= 0) {
      open.current(at);
    }
  }

  return (
    <div className="table" role="table" aria-label={label} aria-rowcount={count}>
      <div className="frame" ref={frame} tabIndex={0} onKeyDown={keys}>
        <div className="thead" role="row" style={{ gridTemplateColumns: template }}>
          {columns.map((column) => {
            const active = sort && column.sort === sort.by;
            return (
              <div key={column.key} role="columnheader" className={column.right ? "right" : ""} aria-sort={active ? (sort.desc ? "descending" : "ascending") : undefined}>
                {column.sort && onSort ? (
                  <button onClick={() => onSort({ by: column.sort!, desc: active ? !sort.desc : true })}>
                    {column.title}<span className="arrow">{active ? (sort.desc ? " ↓" : " ↑") : ""}</span>
                  </button>
                ) : column.title}
              </div>
            );
          })}
        </div>
        {count === 0 && empty}
        <div className="tbody" style={{ height: list.getTotalSize() }}>
          {shown.map((item) => {
            const data = row(item.index);
            return (
              <div key={item.key} data-index={item.index} ref={list.measureElement} className="slot" style={{ transform: `translateY(${item.start}px)` }}>
                <Row columns={columns} data={data} index={item.index} template={template} height={rowHeight} press={press}
                  look={`tr ${at === item.index ? "at" : ""} ${data !== undefined && chosen?.(data) ? "chosen" : ""} ${onOpen ? "opens" : ""}`} />
                {data !== undefined && below?.(data, item.index)}
              </div>
            );
          })}
        </div>
      </div>
    </div>
  );
}

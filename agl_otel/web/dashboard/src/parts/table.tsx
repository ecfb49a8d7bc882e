// A table of any length: only the rows that are seen are drawn. Arrow keys move, Enter opens.
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useRef, useState, type KeyboardEvent, type ReactNode } from "react";

export type Column<T> = { key: string; title: string; width: string; right?: boolean; sort?: string; cell: (row: T, index: number) => ReactNode };
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

export function Table<T>({ columns, count, row, onRange, onOpen, below, sort, onSort, rowHeight = 32, label, chosen, empty }: Props<T>) {
  const frame = useRef<HTMLDivElement>(null);
  const [at, setAt] = useState(-1);
  const list = useVirtualizer({ count, getScrollElement: () => frame.current, estimateSize: () => rowHeight, overscan: 12 });
  const shown = list.getVirtualItems();
  const first = shown[0]?.index ?? 0;
  const last = shown[shown.length - 1]?.index ?? 0;
  useEffect(() => onRange?.(first, last), [first, last, onRange]);
  const template = columns.map((column) => column.width).join(" ");

  function keys(event: KeyboardEvent) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -count, End: count }[event.key];
    if (step !== undefined) {
      const next = Math.max(0, Math.min(count - 1, at + step));
      setAt(next);
      list.scrollToIndex(next);
      event.preventDefault();
    } else if (event.key === "Enter" && event.target === frame.current && at >= 0) {
      const chosenRow = row(at);
      if (chosenRow !== undefined) onOpen?.(chosenRow, at);
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
                <div role="row" aria-rowindex={item.index + 1} style={{ gridTemplateColumns: template, minHeight: rowHeight }}
                  className={`tr ${at === item.index ? "at" : ""} ${data !== undefined && chosen?.(data) ? "chosen" : ""} ${onOpen ? "opens" : ""}`}
                  onClick={(event) => {
                    setAt(item.index);
                    if (data !== undefined && !(event.target as HTMLElement).closest("a,button")) onOpen?.(data, item.index);
                  }}>
                  {data === undefined
                    ? <div role="cell" className="ghost" />
                    : columns.map((column) => <div key={column.key} role="cell" className={column.right ? "right" : ""}>{column.cell(data, item.index)}</div>)}
                </div>
                {data !== undefined && below?.(data, item.index)}
              </div>
            );
          })}
        </div>
      </div>
    </div>
  );
}

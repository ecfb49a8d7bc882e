package identify

import (
	"container/list"
	"sync"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"
)

// IDs says whose span it is; the attempt may be empty.
type IDs struct{ Rollout, Attempt string }

// Known is what identification may ask about traces that were seen before.
type Known interface {
	// OpenedBy gives the ids of the attempt whose root span opened this trace; false where none or several did.
	OpenedBy(pcommon.TraceID) (IDs, bool)
	// Span gives the ids of a span that was seen before.
	Span(pcommon.TraceID, pcommon.SpanID) (IDs, bool)
}

// Limits bound a Memory.
type Limits struct {
	MaxTraces int
	MaxSpans  int
	// MaxAge counts from the last span of a trace.
	MaxAge time.Duration
}

// Memory remembers traces, so that a span without ids of its own can be told by its trace or its parent. It is bounded and local:
// what it forgets is found by the late pass in ClickHouse. The clock is the caller's.
type Memory struct {
	limits Limits

	mu     sync.Mutex
	traces map[pcommon.TraceID]*list.Element // of *trace
	order  *list.List                        // the one that was silent longest is in front
	spans  int
}

type trace struct {
	id        pcommon.TraceID
	owner     IDs  // of whom it was told first
	several   bool // it was told of others, too
	byKey     bool // senders with bound keys alone have told of it
	opened    IDs
	isOpened  bool
	ambiguous bool
	spans     map[pcommon.SpanID]IDs
	seenAt    time.Time
}

// NewMemory makes an empty Memory.
func NewMemory(limits Limits) *Memory {
	return &Memory{limits: limits, traces: map[pcommon.TraceID]*list.Element{}, order: list.New()}
}

// Sizes says how many traces and spans are held.
func (m *Memory) Sizes() (traces, spans int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.traces), m.spans
}

// OpenedBy implements Known.
func (m *Memory) OpenedBy(id pcommon.TraceID) (IDs, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.find(id)
	if t == nil || !t.isOpened || t.ambiguous {
		return IDs{}, false
	}
	return t.opened, true
}

// Span implements Known.
func (m *Memory) Span(id pcommon.TraceID, span pcommon.SpanID) (IDs, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if t := m.find(id); t != nil {
		ids, ok := t.spans[span]
		return ids, ok
	}
	return IDs{}, false
}

// Learn remembers identified spans, in their order. What a sender with a bound key says counts as long as no other sender says something else
// of the trace: it may know the ids of others' traces.
func (m *Memory) Learn(found []Found, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range found {
		if f := &found[i]; f.Rollout != "" && f.Reason == "" {
			m.learn(f, now)
		}
	}
	m.forget(now)
}

func (m *Memory) find(id pcommon.TraceID) *trace {
	if element, ok := m.traces[id]; ok {
		return element.Value.(*trace)
	}
	return nil
}

func (m *Memory) learn(f *Found, now time.Time) {
	t := m.find(f.TraceID)
	if t == nil {
		t = &trace{id: f.TraceID, owner: f.IDs, byKey: f.ByKey}
		m.traces[f.TraceID] = m.order.PushBack(t)
	} else {
		m.order.MoveToBack(m.traces[f.TraceID])
	}
	t.seenAt = now
	if !m.mayTell(t, f) {
		return
	}
	if f.Opens {
		t.ambiguous = t.ambiguous || (t.isOpened && t.opened != f.IDs)
		if !t.isOpened {
			t.opened, t.isOpened = f.IDs, true
		}
	}
	// Spans of a trace with one attempt are told by the trace: only spans that say something else need remembering.
	tells := t.ambiguous || !t.isOpened || t.opened != f.IDs
	if _, known := t.spans[f.SpanID]; (tells && !known) || f.Opens {
		if t.spans == nil {
			t.spans = map[pcommon.SpanID]IDs{}
		}
		if !known {
			m.spans++
		}
		t.spans[f.SpanID] = f.IDs
	}
}

// mayTell says whether what a sender says of the trace counts; what counts less is forgotten.
func (m *Memory) mayTell(t *trace, f *Found) bool {
	differs := t.several || t.owner != f.IDs
	if t.byKey && differs {
		m.spans -= len(t.spans)
		t.opened, t.isOpened, t.spans = IDs{}, false, nil
	}
	if f.ByKey {
		t.several = t.several || t.byKey && differs
		return !differs
	}
	if t.byKey {
		t.owner, t.several, t.byKey = f.IDs, false, false
	} else {
		t.several = differs
	}
	return true
}

func (m *Memory) forget(now time.Time) {
	for front := m.order.Front(); front != nil; front = m.order.Front() {
		t := front.Value.(*trace)
		if len(m.traces) <= m.limits.MaxTraces && m.spans <= m.limits.MaxSpans && now.Sub(t.seenAt) <= m.limits.MaxAge {
			return
		}
		m.order.Remove(front)
		delete(m.traces, t.id)
		m.spans -= len(t.spans)
	}
}

package identify

import "go.opentelemetry.io/collector/pdata/pcommon"

// inheritance is rule 2, for spans that no level names: by the trace that an attempt opened, else by the parent, in this request or
// before it.
type inheritance struct {
	found    []Found
	pending  []bool
	parents  []pcommon.SpanID
	known    Known
	here     map[place]int
	opened   map[pcommon.TraceID]opening
	resolved map[int]IDs
}

type place struct {
	trace pcommon.TraceID
	span  pcommon.SpanID
}

// opening is what this request says of a trace; several attempts say nothing.
type opening struct {
	ids     IDs
	several bool
}

func newInheritance(found []Found, pending []bool, parents []pcommon.SpanID, known Known) *inheritance {
	in := &inheritance{
		found: found, pending: pending, parents: parents, known: known,
		here: make(map[place]int, len(found)), opened: map[pcommon.TraceID]opening{}, resolved: map[int]IDs{},
	}
	for i := range found {
		f := &found[i]
		key := place{f.TraceID, f.SpanID}
		if _, twice := in.here[key]; !twice {
			in.here[key] = i
		}
		if !pending[i] && f.Rollout != "" && f.Opens {
			before, ok := in.opened[f.TraceID]
			in.opened[f.TraceID] = opening{f.IDs, ok && (before.several || before.ids != f.IDs)}
		}
	}
	for id, o := range in.opened {
		if before, ok := known.OpenedBy(id); ok && before != o.ids {
			in.opened[id] = opening{several: true}
		}
	}
	return in
}

func (in *inheritance) run() {
	for i := range in.found {
		if in.pending[i] {
			in.resolved[i] = in.ids(i)
		}
	}
	for i, ids := range in.resolved {
		in.found[i].IDs = ids
	}
}

// ids walks up from span i until somebody knows.
func (in *inheritance) ids(i int) IDs {
	var trail []int
	ids := IDs{}
	passed := map[int]bool{}
	for !passed[i] {
		if !in.pending[i] { // an ancestor that names its rollout, or one that is refused
			ids = in.found[i].IDs
			break
		}
		if known, ok := in.resolved[i]; ok {
			ids = known
			break
		}
		passed[i] = true
		trail = append(trail, i)
		f := &in.found[i]
		if known, ok := in.byTrace(f.TraceID); ok {
			ids = known
			break
		}
		parent := place{f.TraceID, in.parents[i]}
		next, ok := in.here[parent]
		if !ok {
			ids, _ = in.known.Span(parent.trace, parent.span)
			break
		}
		i = next
	}
	for _, each := range trail {
		in.resolved[each] = ids
	}
	return ids
}

func (in *inheritance) byTrace(id pcommon.TraceID) (IDs, bool) {
	if o, ok := in.opened[id]; ok {
		return o.ids, !o.several
	}
	return in.known.OpenedBy(id)
}

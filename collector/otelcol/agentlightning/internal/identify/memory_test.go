package identify

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pcommon"
)

var start = time.Unix(1_750_000_000, 0)

func opening1(n byte, ids IDs) []Found {
	return []Found{{IDs: ids, TraceID: pcommon.TraceID{n}, SpanID: pcommon.SpanID{n}, Opens: true}}
}

func TestMemoryForgetsTheTraceThatWasSilentLongest(t *testing.T) {
	memory := NewMemory(Limits{MaxTraces: 2, MaxSpans: 100, MaxAge: time.Hour})
	memory.Learn(opening1(1, IDs{"ro-1", "at"}), start)
	memory.Learn(opening1(2, IDs{"ro-2", "at"}), start)
	memory.Learn(opening1(1, IDs{"ro-1", "at"}), start)
	memory.Learn(opening1(3, IDs{"ro-3", "at"}), start)
	_, second := memory.OpenedBy(pcommon.TraceID{2})
	require.False(t, second)
	ids, first := memory.OpenedBy(pcommon.TraceID{1})
	require.True(t, first)
	require.Equal(t, IDs{"ro-1", "at"}, ids)
}

func TestMemoryForgetsWhatIsOldAndCountsItsSpans(t *testing.T) {
	memory := NewMemory(Limits{MaxTraces: 10, MaxSpans: 100, MaxAge: time.Minute})
	memory.Learn([]Found{{IDs: IDs{"ro-1", ""}, TraceID: pcommon.TraceID{1}, SpanID: pcommon.SpanID{1}}}, start)
	memory.Learn(opening1(2, IDs{"ro-2", "at"}), start.Add(2*time.Minute))
	traces, spans := memory.Sizes()
	require.Equal(t, []int{1, 1}, []int{traces, spans})
}

func TestMemoryHoldsNoMoreSpansThanItsBound(t *testing.T) {
	memory := NewMemory(Limits{MaxTraces: 10, MaxSpans: 3, MaxAge: time.Hour})
	for n := range byte(5) {
		memory.Learn([]Found{{IDs: IDs{"ro", "at"}, TraceID: pcommon.TraceID{n + 1}, SpanID: pcommon.SpanID{1}}}, start)
	}
	traces, spans := memory.Sizes()
	require.Equal(t, []int{3, 3}, []int{traces, spans})
}

func TestSpansOfATraceWithOneAttemptAreToldByTheTraceAlone(t *testing.T) {
	memory := NewMemory(Limits{MaxTraces: 10, MaxSpans: 100, MaxAge: time.Hour})
	memory.Learn(opening1(1, IDs{"ro", "at"}), start)
	for n := range byte(50) {
		memory.Learn([]Found{{IDs: IDs{"ro", "at"}, TraceID: pcommon.TraceID{1}, SpanID: pcommon.SpanID{9, n}}}, start)
	}
	_, spans := memory.Sizes()
	require.Equal(t, 1, spans)
}

func TestMemoryMayBeUsedByManyRequestsAtOnce(t *testing.T) {
	memory := NewMemory(Limits{MaxTraces: 5, MaxSpans: 100, MaxAge: time.Hour})
	var group sync.WaitGroup
	for n := range byte(8) {
		group.Go(func() {
			for range 200 {
				memory.Learn(opening1(n+1, IDs{"ro", "at"}), start)
				memory.OpenedBy(pcommon.TraceID{n})
				memory.Span(pcommon.TraceID{n}, pcommon.SpanID{n})
			}
		})
	}
	group.Wait()
	traces, _ := memory.Sizes()
	require.LessOrEqual(t, traces, 5)
}

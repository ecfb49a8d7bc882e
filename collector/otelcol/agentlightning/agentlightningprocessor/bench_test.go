package agentlightningprocessor

import (
	"fmt"
	"testing"
	"time"

	"go.opentelemetry.io/collector/pdata/ptrace"

	"agl-otel.internal/agentlightning/internal/identify"
)

// What the processor's own work costs a span, without the queue: ids on the resource, twelve attributes.
func BenchmarkSpan(b *testing.B) {
	attributes := map[string]any{}
	for n := range 12 {
		attributes[fmt.Sprintf("gen_ai.attribute.%d", n)] = "a value of thirty characters .."
	}
	const perRequest = 500
	spans := make([]map[string]any, perRequest)
	for n := range spans {
		spans[n] = attributes
	}
	memory := identify.NewMemory(createDefaultConfig().(*Config).limits())
	now := time.Now()
	original := newRequest(ids("ro", "at"), spans...)
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		request := ptrace.NewTraces()
		original.CopyTo(request)
		b.StartTimer()
		found := identify.Spans(request, identify.Headers{}, memory, identify.Options{NowUnixNano: uint64(now.UnixNano())})
		memory.Learn(found, now)
		new(mender).traces(request)
		writeTraces(request, found, now)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/perRequest, "ns/span")
}

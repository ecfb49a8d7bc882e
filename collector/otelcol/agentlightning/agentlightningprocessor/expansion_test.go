package agentlightningprocessor

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"agl-otel.internal/agentlightning/internal/refusals"
)

func TestRowsThatShareMuchAreBounded(t *testing.T) {
	long := strings.Repeat("x", 64<<10)
	for name, wide := range map[string]bool{"resource": true, "scope": false} {
		traces, logs := ptrace.NewTraces(), plog.NewLogs()
		spans := traces.ResourceSpans().AppendEmpty()
		records := logs.ResourceLogs().AppendEmpty()
		scope, scopeOfLogs := spans.ScopeSpans().AppendEmpty(), records.ScopeLogs().AppendEmpty()
		if wide {
			spans.Resource().Attributes().PutStr("long", long)
			records.Resource().Attributes().PutStr("long", long)
		} else {
			scope.Scope().SetName(long)
			scopeOfLogs.Scope().Attributes().PutEmptySlice("long").AppendEmpty().SetStr(long)
		}
		for range 100 {
			scope.Spans().AppendEmpty()
			scopeOfLogs.LogRecords().AppendEmpty()
		}
		for limit, refused := range map[int]bool{6 << 20: true, 7 << 20: false} {
			c := &core{config: &Config{MaxExpandedBytes: limit}}
			for _, err := range []error{c.checkTraces(traces, 1000), c.checkLogs(logs, 1000)} {
				if (err != nil) != refused || (err != nil && (status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "max_expanded_bytes"))) {
					t.Errorf("%s, at most %d bytes: %v", name, limit, err)
				}
			}
		}
	}
}

func TestRowsOfEveryKindOfMetricAreBounded(t *testing.T) {
	for name, add := range map[string]func(pmetric.Metric){
		"gauge":     func(m pmetric.Metric) { m.SetEmptyGauge().DataPoints().AppendEmpty() },
		"sum":       func(m pmetric.Metric) { m.SetEmptySum().DataPoints().AppendEmpty() },
		"histogram": func(m pmetric.Metric) { m.SetEmptyHistogram().DataPoints().AppendEmpty() },
		"exponential histogram": func(m pmetric.Metric) {
			m.SetEmptyExponentialHistogram().DataPoints().AppendEmpty()
		},
		"summary": func(m pmetric.Metric) { m.SetEmptySummary().DataPoints().AppendEmpty() },
	} {
		request := pmetric.NewMetrics()
		group := request.ResourceMetrics().AppendEmpty()
		group.Resource().Attributes().PutStr("long", strings.Repeat("x", 64<<10))
		scope := group.ScopeMetrics().AppendEmpty()
		for range 100 {
			add(scope.Metrics().AppendEmpty())
		}
		for limit, refused := range map[int]bool{6 << 20: true, 7 << 20: false} {
			c := &core{config: &Config{MaxExpandedBytes: limit}}
			if _, err := c.processMetrics(t.Context(), request); (err != nil) != refused || refused && status.Code(err) != codes.InvalidArgument {
				t.Errorf("%s, at most %d bytes: %v", name, limit, err)
			}
		}
	}
}

// Who counts refused requests tells them from malformed ones.
func TestARequestWithTooLargeRowsIsCrowded(t *testing.T) {
	c := &core{config: &Config{}, now: time.Now}
	traces, logs, metrics := ptrace.NewTraces(), plog.NewLogs(), pmetric.NewMetrics()
	traces.ResourceSpans().AppendEmpty()
	logs.ResourceLogs().AppendEmpty()
	metrics.ResourceMetrics().AppendEmpty()
	for name, process := range map[string]func(context.Context) error{
		"traces": func(ctx context.Context) error {
			_, err := c.processTraces(ctx, traces)
			return err
		},
		"logs": func(ctx context.Context) error {
			_, err := c.processLogs(ctx, logs)
			return err
		},
		"metrics": func(ctx context.Context) error {
			_, err := c.processMetrics(ctx, metrics)
			return err
		},
	} {
		ctx, refused := refusals.Within(t.Context())
		err := process(ctx)
		if crowded := new(refusals.CrowdedError); err == nil || !errors.As(refused.Error(err), crowded) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestControlCharactersInJSONCountAsTheyAreWritten(t *testing.T) {
	value := pcommon.NewValueSlice()
	item := value.Slice().AppendEmpty().SetEmptyMap()
	item.PutStr("key\x02", strings.Repeat("\x01", 1000))
	written := len(value.AsString())
	if counted := sizeOfValue(value); counted < written || counted > written+200 {
		t.Errorf("counted as %d bytes, written as %d", counted, written)
	}
}

package agentlightningprocessor

import (
	"fmt"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A request holds a resource and a scope once, and the exporter stores both with each span, log record and data point: a request of a
// megabyte can become gigabytes. What is shared is measured once, and a request whose rows would take more than MaxExpandedBytes is refused
// for good, as by collector/expansion.py.

const rowBytes = 512 // of a row that holds nothing

func (c *core) checkTraces(request ptrace.Traces, size int) error {
	found := size
	for _, group := range request.ResourceSpans().All() {
		shared := sizeOfMap(group.Resource().Attributes()) + len(group.SchemaUrl())
		for _, part := range group.ScopeSpans().All() {
			found += part.Spans().Len() * (rowBytes + shared + sizeOfScope(part.Scope()) + len(part.SchemaUrl()))
		}
	}
	return c.refuse(found)
}

func (c *core) checkLogs(request plog.Logs, size int) error {
	found := size
	for _, group := range request.ResourceLogs().All() {
		shared := sizeOfMap(group.Resource().Attributes()) + len(group.SchemaUrl())
		for _, part := range group.ScopeLogs().All() {
			found += part.LogRecords().Len() * (rowBytes + shared + sizeOfScope(part.Scope()) + len(part.SchemaUrl()))
		}
	}
	return c.refuse(found)
}

func (c *core) checkMetrics(request pmetric.Metrics, size int) error {
	found := size
	for _, group := range request.ResourceMetrics().All() {
		shared := rowBytes + sizeOfMap(group.Resource().Attributes()) + len(group.SchemaUrl())
		for _, part := range group.ScopeMetrics().All() {
			own := shared + sizeOfScope(part.Scope()) + len(part.SchemaUrl())
			for _, metric := range part.Metrics().All() {
				found += pointsOf(metric) * (own + len(metric.Name()) + len(metric.Description()) + len(metric.Unit()))
			}
		}
	}
	return c.refuse(found)
}

func pointsOf(metric pmetric.Metric) int {
	switch metric.Type() {
	case pmetric.MetricTypeGauge:
		return metric.Gauge().DataPoints().Len()
	case pmetric.MetricTypeSum:
		return metric.Sum().DataPoints().Len()
	case pmetric.MetricTypeHistogram:
		return metric.Histogram().DataPoints().Len()
	case pmetric.MetricTypeExponentialHistogram:
		return metric.ExponentialHistogram().DataPoints().Len()
	case pmetric.MetricTypeSummary:
		return metric.Summary().DataPoints().Len()
	default:
		return 0
	}
}

func (c *core) refuse(found int) error {
	if found <= c.config.MaxExpandedBytes {
		return nil
	}
	return status.Error(codes.InvalidArgument, fmt.Sprintf("its rows would take about %d bytes, more than `max_expanded_bytes` (%d): each has its "+
		"whole resource and scope; send a smaller resource, or fewer items in a request", found, c.config.MaxExpandedBytes))
}

func sizeOfScope(scope pcommon.InstrumentationScope) int {
	return len(scope.Name()) + len(scope.Version()) + sizeOfMap(scope.Attributes())
}

// What a key or a value takes beside its text.
const overhead = 16

func sizeOfMap(attributes pcommon.Map) int {
	size := 0
	for key, value := range attributes.All() {
		size += overhead + len(key) + sizeOfValue(value)
	}
	return size
}

func sizeOfValue(value pcommon.Value) int {
	if value.Type() == pcommon.ValueTypeStr {
		return overhead + len(value.Str())
	}
	return sizeInJSON(value)
}

// Of a value that the exporter writes as JSON, or one inside it.
func sizeInJSON(value pcommon.Value) int {
	switch value.Type() {
	case pcommon.ValueTypeStr:
		return overhead + sizeOfText(value.Str())
	case pcommon.ValueTypeBytes:
		return overhead + 2*value.Bytes().Len()
	case pcommon.ValueTypeMap:
		size := overhead
		for key, item := range value.Map().All() {
			size += overhead + sizeOfText(key) + sizeInJSON(item)
		}
		return size
	case pcommon.ValueTypeSlice:
		size := overhead
		for _, item := range value.Slice().All() {
			size += sizeInJSON(item)
		}
		return size
	default:
		return 2 * overhead
	}
}

// JSON writes a control character in up to six bytes.
func sizeOfText(text string) int {
	size := len(text)
	for at := range len(text) {
		if text[at] < ' ' {
			size += 5
		}
	}
	return size
}

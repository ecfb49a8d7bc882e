package agentlightningprocessor

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/ptrace"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/wire"
)

// item is what the vectors say of a span or record.
type item struct {
	Rollout    string            `json:"rollout"`
	Attempt    string            `json:"attempt"`
	Text       string            `json:"text"`
	Scope      string            `json:"scope"`
	Attributes map[string]string `json:"attributes"`
	Resource   map[string]string `json:"resource"`
	Reject     string            `json:"reject"`
}

var rejections = map[string]string{
	identify.ReasonTraceID: "trace_id", identify.ReasonSpanID: "span_id", identify.ReasonTimestamp: "timestamp",
	identify.ReasonText: "unreadable", identify.ReasonNesting: "unreadable", identify.ReasonWire: "unreadable",
}

func TestGoldenVectorsOfTheWire(t *testing.T) {
	raw, err := os.ReadFile("../../../conformance/wire/wire.json")
	require.NoError(t, err)
	var file struct {
		Now     string `json:"nowUnixNano"`
		Vectors []struct {
			Name    string `json:"name"`
			Signal  string `json:"signal"`
			Request string `json:"request"`
			Refused bool   `json:"refused"`
			Pdata   *bool  `json:"pdata"`
			Items   []item `json:"items"`
		} `json:"vectors"`
	}
	require.NoError(t, json.Unmarshal(raw, &file))
	require.Greater(t, len(file.Vectors), 70)
	now, err := strconv.ParseUint(file.Now, 10, 64)
	require.NoError(t, err)
	for _, vector := range file.Vectors {
		t.Run(vector.Name, func(t *testing.T) {
			if vector.Pdata != nil && !*vector.Pdata {
				t.Skip("the Go data model does not see what is wrong with this request")
			}
			request, err := hex.DecodeString(vector.Request)
			require.NoError(t, err)
			read := map[string]func([]byte, uint64) ([]item, error){"traces": spanItems, "logs": recordItems}[vector.Signal]
			found, err := read(request, now)
			if vector.Refused {
				require.Error(t, err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, vector.Items, found)
		})
	}
}

func spanItems(body []byte, now uint64) ([]item, error) {
	clean, err := wire.Clean("ExportTraceServiceRequest", body, func(int64) error { return nil })
	if err != nil {
		return nil, err
	}
	request, err := (&ptrace.ProtoUnmarshaler{}).UnmarshalTraces(clean)
	if err != nil {
		return nil, err
	}
	options := identify.Options{NowUnixNano: now, NoText: new(mender).traces(request)}
	found := identify.Spans(request, identify.Headers{}, identify.NewMemory(identify.Limits{MaxTraces: 10, MaxSpans: 10, MaxAge: time.Hour}), options)
	items := []item{}
	for _, group := range request.ResourceSpans().All() {
		for _, scope := range group.ScopeSpans().All() {
			for _, span := range scope.Spans().All() {
				items = append(items, itemOf(found[len(items)], span.Name(), span.Attributes(), group.Resource(), scope.Scope()))
			}
		}
	}
	return items, nil
}

func recordItems(body []byte, now uint64) ([]item, error) {
	clean, err := wire.Clean("ExportLogsServiceRequest", body, func(int64) error { return nil })
	if err != nil {
		return nil, err
	}
	request, err := (&plog.ProtoUnmarshaler{}).UnmarshalLogs(clean)
	if err != nil {
		return nil, err
	}
	options := identify.Options{NowUnixNano: now, NoText: new(mender).logs(request)}
	found := identify.Logs(request, identify.Headers{}, identify.NewMemory(identify.Limits{MaxTraces: 10, MaxSpans: 10, MaxAge: time.Hour}), options)
	items := []item{}
	for _, group := range request.ResourceLogs().All() {
		for _, scope := range group.ScopeLogs().All() {
			for _, record := range scope.LogRecords().All() {
				items = append(items, itemOf(found[len(items)], record.Body().AsString(), record.Attributes(), group.Resource(), scope.Scope()))
			}
		}
	}
	return items, nil
}

func itemOf(found identify.Found, text string, attributes pcommon.Map, resource pcommon.Resource, scope pcommon.InstrumentationScope) item {
	if found.Reason != "" {
		return item{Reject: rejections[found.Reason]}
	}
	return item{found.Rollout, found.Attempt, text, scope.Name(), storedTexts(attributes), storedTexts(resource.Attributes()), ""}
}

// storedTexts are the values as the exporter stores them; nil where there are none.
func storedTexts(attributes pcommon.Map) map[string]string {
	var found map[string]string
	for key, value := range attributes.All() {
		if found == nil {
			found = map[string]string{}
		}
		found[key] = value.AsString()
	}
	return found
}

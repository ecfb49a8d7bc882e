package wire

import (
	"bytes"
	"encoding/hex"
	"os"
	"regexp"
	"slices"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/plog/plogotlp"
	"go.opentelemetry.io/collector/pdata/pmetric/pmetricotlp"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/pdata/ptrace/ptraceotlp"
	"google.golang.org/protobuf/encoding/protowire"

	"agl-otel.internal/agentlightning/internal/identify"
)

const (
	traces  = "ExportTraceServiceRequest"
	logs    = "ExportLogsServiceRequest"
	metrics = "ExportMetricsServiceRequest"
)

// message in the order given: number, content, number, content, …
func of(pairs ...any) []byte {
	var raw []byte
	for i := 0; i < len(pairs); i += 2 {
		raw = protowire.AppendTag(raw, protowire.Number(pairs[i].(int)), protowire.BytesType)
		switch content := pairs[i+1].(type) {
		case string:
			raw = protowire.AppendString(raw, content)
		case []byte:
			raw = protowire.AppendBytes(raw, content)
		}
	}
	return raw
}

func nested(levels int) []byte {
	value := of(1, "deep")
	for range levels {
		value = of(6, of(1, of(1, "k", 2, value)))
	}
	return of(1, "key", 2, value)
}

var trace, spanID, goodSpan = bytes.Repeat([]byte{1}, 16), bytes.Repeat([]byte{2}, 8), of(1, bytes.Repeat([]byte{1}, 16), 2, bytes.Repeat([]byte{2}, 8), 5, "good")

func request(resource []byte, scope []byte, items ...[]byte) []byte {
	below := of(1, scope)
	for _, item := range items {
		below = append(below, of(2, item)...)
	}
	return of(1, append(of(1, resource), of(2, below)...))
}

func parsed(t *testing.T, raw []byte) []ptrace.Span {
	t.Helper()
	cleaned, err := Clean(traces, raw, unbounded)
	require.NoError(t, err)
	request := ptraceotlp.NewExportRequest()
	require.NoError(t, request.UnmarshalProto(cleaned))
	var found []ptrace.Span
	for _, group := range request.Traces().ResourceSpans().All() {
		for _, scope := range group.ScopeSpans().All() {
			for _, one := range scope.Spans().All() {
				found = append(found, one)
			}
		}
	}
	return found
}

func reasonOf(attributes pcommon.Map) string {
	value, _ := attributes.Get(identify.AttrInvalid)
	return value.AsString()
}

func reasons(spans []ptrace.Span) []string {
	found := make([]string, 0, len(spans))
	for _, one := range spans {
		reason := ""
		if _, refused := one.Attributes().Get(identify.AttrInvalid); refused {
			reason = reasonOf(one.Attributes())
		}
		found = append(found, reason)
	}
	return found
}

func TestARequestInWhichNothingIsWrongIsNotCopied(t *testing.T) {
	raw := request(of(1, nested(20)), nil, goodSpan, of(1, trace, 2, spanID, 9, nested(20)))
	cleaned, err := Clean(traces, raw, unbounded)
	require.NoError(t, err)
	require.Same(t, &raw[0], &cleaned[0])
}

func TestOneIdOfAnotherLengthRefusesItsSpanAlone(t *testing.T) {
	short, long := []byte{1, 2, 3}, bytes.Repeat([]byte{7}, 17)
	spans := parsed(t, request(nil, nil, goodSpan, of(1, short, 2, spanID, 5, "a"), of(1, trace, 2, long, 5, "b"), of(1, trace, 2, spanID, 4, short, 5, "c"),
		of(1, trace, 2, spanID, 4, long, 1, long), goodSpan))
	require.Equal(t, []string{"", identify.ReasonTraceID, identify.ReasonSpanID, identify.ReasonParentID, identify.ReasonTraceID, ""}, reasons(spans))
	require.Equal(t, "a", spans[1].Name())
	require.Equal(t, pcommon.TraceID(trace), spans[2].TraceID())
}

func TestALinkKeepsWhatIsAnId(t *testing.T) {
	spans := parsed(t, request(nil, nil, of(1, trace, 2, spanID, 13, of(1, []byte{1}, 2, spanID, 4, of(1, "k")))))
	require.Equal(t, []string{""}, reasons(spans))
	link := spans[0].Links().At(0)
	require.True(t, link.TraceID().IsEmpty())
	require.Equal(t, pcommon.SpanID(spanID), link.SpanID())
	require.Equal(t, 1, link.Attributes().Len())
}

func TestDeepValuesRefuseTheirSpanAlone(t *testing.T) {
	for _, where := range []int{9, 11, 13} {
		attributes := map[int]int{9: 0, 11: 3, 13: 4}[where]
		deep := nested(90)
		if attributes != 0 {
			deep = of(attributes, deep)
		}
		spans := parsed(t, request(nil, nil, goodSpan, of(1, trace, 2, spanID, 5, "deep", where, deep, 9, of(1, "k"))))
		require.Equal(t, []string{"", identify.ReasonNesting}, reasons(spans))
		require.Equal(t, "deep", spans[1].Name())
		require.Equal(t, 1, spans[1].Attributes().Len())
	}
}

func TestDeepValuesOfAResourceOrScopeRefuseItsSpans(t *testing.T) {
	other := request(nil, nil, goodSpan)
	require.Equal(t, []string{identify.ReasonNesting, ""}, reasons(parsed(t, append(request(of(1, nested(90)), nil, goodSpan), other...))))
	require.Equal(t, []string{identify.ReasonNesting, ""}, reasons(parsed(t, append(request(nil, of(3, nested(90)), goodSpan), other...))))
}

func TestTheDeepestThatIsTakenIsWhatPythonsProtobufReads(t *testing.T) {
	// A value of a span is 5 messages down, each kvlist 3 more.
	require.Equal(t, []string{""}, reasons(parsed(t, request(nil, nil, of(1, trace, 2, spanID, 9, nested(31))))))
	require.Equal(t, []string{identify.ReasonNesting}, reasons(parsed(t, request(nil, nil, of(1, trace, 2, spanID, 9, nested(32))))))
}

func TestLogRecords(t *testing.T) {
	body := func(key []byte) []byte { return of(6, of(1, key)) }
	cleaned, err := Clean(logs, request(nil, nil, of(5, body(nested(90)), 9, trace), of(9, []byte{1}), of(10, []byte{1}, 5, of(1, "x")), of(5, of(1, "good"), 9, trace)), unbounded)
	require.NoError(t, err)
	request := plogotlp.NewExportRequest()
	require.NoError(t, request.UnmarshalProto(cleaned))
	var found []string
	for _, record := range request.Logs().ResourceLogs().At(0).ScopeLogs().At(0).LogRecords().All() {
		if _, refused := record.Attributes().Get(identify.AttrInvalid); refused {
			found = append(found, reasonOf(record.Attributes()))
		} else {
			found = append(found, "")
		}
	}
	require.Equal(t, []string{identify.ReasonNesting, identify.ReasonTraceID, identify.ReasonSpanID, ""}, found)
}

func TestDeepMetricsAreRefusedBeforeAnybodyWalksThem(t *testing.T) {
	for _, raw := range [][]byte{
		request(of(1, nested(90)), nil), request(nil, of(3, nested(90))), request(nil, nil, of(12, nested(90))),
		request(nil, nil, of(5, of(1, of(7, nested(90))))), request(nil, nil, of(9, of(1, of(8, of(7, nested(90)))))),
	} {
		_, err := Clean(metrics, raw, unbounded)
		require.ErrorIs(t, err, ErrNested)
	}
	raw := request(nil, nil, of(5, of(1, of(7, nested(10)))))
	cleaned, err := Clean(metrics, raw, unbounded)
	require.NoError(t, err)
	require.NoError(t, pmetricotlp.NewExportRequest().UnmarshalProto(cleaned))
}

func TestMegabytesOfNestingDoNotEndTheProcess(t *testing.T) {
	var backwards []byte // an array in an array, from the inside out
	for range 1_000_000 {
		for _, number := range []protowire.Number{1, 5} {
			head := protowire.AppendVarint(protowire.AppendTag(nil, number, protowire.BytesType), uint64(len(backwards)))
			slices.Reverse(head)
			backwards = append(backwards, head...)
		}
	}
	slices.Reverse(backwards)
	deep := backwards
	require.Equal(t, []string{identify.ReasonNesting}, reasons(parsed(t, request(nil, nil, of(1, trace, 2, spanID, 9, of(2, deep))))))
}

func TestWhatIsNoProtobufIsNotTakenForSome(t *testing.T) {
	for _, raw := range [][]byte{{0xff}, {0x0a, 0x05, 1}, []byte("hello world")} {
		cleaned, err := Clean(traces, raw, unbounded)
		if err == nil {
			require.Error(t, ptraceotlp.NewExportRequest().UnmarshalProto(cleaned))
		}
	}
	spans := parsed(t, request(nil, nil, append(slices.Clone(goodSpan), 0xff), goodSpan))
	require.Equal(t, []string{identify.ReasonWire, ""}, reasons(spans))
	require.Equal(t, "good", spans[0].Name())
	spans = parsed(t, append(request([]byte{0xff}, nil, goodSpan), append(request(nil, []byte{0xff}, goodSpan), request(nil, nil, goodSpan)...)...))
	require.Equal(t, []string{identify.ReasonWire, identify.ReasonWire, ""}, reasons(spans))
	_, err := Clean(metrics, request(nil, nil, []byte{0xff}), unbounded)
	require.ErrorIs(t, err, errMalformed)
	same, err := Clean("ExportProfilesServiceRequest", []byte{0xff}, unbounded)
	require.NoError(t, err)
	require.Equal(t, []byte{0xff}, same)
}

func FuzzClean(f *testing.F) {
	f.Add(request(of(1, nested(40)), nil, of(1, []byte{1}, 9, nested(40), 13, of(1, []byte{3}))))
	file, err := os.ReadFile("../../../../conformance/wire/wire.json")
	require.NoError(f, err)
	for _, seed := range regexp.MustCompile(`"request": "([0-9a-f]+)"`).FindAllSubmatch(file, -1) {
		raw, err := hex.DecodeString(string(seed[1]))
		require.NoError(f, err)
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, name := range []string{traces, logs, metrics} {
			cleaned, err := Clean(name, raw, unbounded)
			if err != nil {
				continue
			}
			again, err := Clean(name, cleaned, unbounded)
			require.NoError(t, err)
			require.Equal(t, cleaned, again)
			switch name {
			case traces:
				require.NoError(t, ptraceotlp.NewExportRequest().UnmarshalProto(cleaned))
			case logs:
				require.NoError(t, plogotlp.NewExportRequest().UnmarshalProto(cleaned))
			}
		}
	})
}

func TestJSON(t *testing.T) {
	deep := `{"stringValue":"x"}`
	for range 40 {
		deep = `{"kvlistValue":{"values":[{"key":"k","value":` + deep + `}]}}`
	}
	good := `{"traceId":"01010101010101010101010101010101","spanId":"0202020202020202","name":"good","startTimeUnixNano":"1750000000000000001"}`
	raw := `{"resourceSpans":[{"resource":{"attributes":[{"key":"a","value":{"intValue":"9007199254740993"}}]},"scopeSpans":[{"spans":[` + good +
		`,{"traceId":"0101","spanId":"0202020202020202","name":"a"},{"trace_id":"01010101010101010101010101010101","span_id":"zz","name":"b"},` +
		`{"traceId":"01010101010101010101010101010101","spanId":"0202020202020202","parentSpanId":"02","links":[{"traceId":"1"}]},` +
		`{"traceId":"01010101010101010101010101010101","spanId":"0202020202020202","name":"deep","attributes":[{"key":"k","value":` + deep + `}]}]}]},` +
		`{"resource":{"attributes":[{"key":"k","value":` + deep + `}]},"scopeSpans":[{"spans":[` + good + `]}]}]}`
	_, err := (&ptrace.JSONUnmarshaler{}).UnmarshalTraces([]byte(raw))
	require.Error(t, err)
	cleaned, err := CleanJSON(traces, []byte(raw), unbounded)
	require.NoError(t, err)
	request, err := (&ptrace.JSONUnmarshaler{}).UnmarshalTraces(cleaned)
	require.NoError(t, err)
	var found []ptrace.Span
	for _, group := range request.ResourceSpans().All() {
		for _, one := range group.ScopeSpans().At(0).Spans().All() {
			found = append(found, one)
		}
	}
	require.Equal(t, []string{"", identify.ReasonTraceID, identify.ReasonSpanID, identify.ReasonParentID, identify.ReasonNesting, identify.ReasonNesting}, reasons(found))
	require.Equal(t, pcommon.Timestamp(1750000000000000001), found[0].StartTimestamp())
	number, _ := request.ResourceSpans().At(0).Resource().Attributes().Get("a")
	require.Equal(t, int64(9007199254740993), number.Int())

	whole := []byte(`{"resourceSpans":[{"scopeSpans":[{"spans":[` + good + `]}]}]}`)
	same, err := CleanJSON(traces, whole, unbounded)
	require.NoError(t, err)
	require.Same(t, &whole[0], &same[0])
	for _, refused := range []string{`{"resourceMetrics":[{"resource":{"attributes":[{"key":"k","value":` + deep + `}]}}]}`, string(bytes.Repeat([]byte("["), 100_000))} {
		_, err := CleanJSON(metrics, []byte(refused), unbounded)
		require.ErrorIs(t, err, ErrNested)
	}
}

func TestATextInJSONThatIsNoneStaysOne(t *testing.T) {
	span := func(id, name string) string {
		return `{"traceId":"01010101010101010101010101010101","spanId":"` + id + `","name":"` + name + `"}`
	}
	const good = "0202020202020202"
	for _, spoiled := range []string{`a\ud800b`, `a\uDC00b`, `a\ud83d\ud83d\ude00`, `\\\udead`, "a\xffb", "a\xed\xa0\x80b"} {
		for _, id := range []string{good, "zz"} { // with an id that is none, the request is rewritten
			raw := `{"resourceSpans":[{"scopeSpans":[{"spans":[` + span(good, `\ud83d\ude00 \\ud800`) + "," + span(good, spoiled) + "," + span(id, "x") + `]}]}]}`
			cleaned, err := CleanJSON(traces, []byte(raw), unbounded)
			require.NoError(t, err)
			request, err := (&ptrace.JSONUnmarshaler{}).UnmarshalTraces(cleaned)
			require.NoError(t, err)
			spans := request.ResourceSpans().At(0).ScopeSpans().At(0).Spans()
			require.Equal(t, "\U0001f600 \\ud800", spans.At(0).Name())
			require.False(t, utf8.ValidString(spans.At(1).Name()), "%q %q", spoiled, spans.At(1).Name())
			require.Equal(t, "x", spans.At(2).Name())
		}
	}
}

// The words are those of the Python collector.
func TestItemsOfAnotherSignalInJSONAreRefusedWithTheirPath(t *testing.T) {
	paths := map[string]string{traces: "/v1/traces", logs: "/v1/logs", metrics: "/v1/metrics"}
	fields := map[string][]string{
		traces:  {"resourceSpans", "resource_spans"},
		logs:    {"resourceLogs", "resource_logs"},
		metrics: {"resourceMetrics", "resource_metrics"},
	}
	for request := range paths {
		for owner, names := range fields {
			for _, name := range names {
				for _, value := range []string{"[{}]", ` [ {"a":1} ]`, `{"a":1}`, "1", "true", `"x"`} {
					_, err := CleanJSON(request, []byte(`{"another":[{}],"`+name+`":`+value+`}`), unbounded)
					if owner == request {
						require.NoError(t, err)
						continue
					}
					require.EqualError(t, err, "this is no "+request+" as OTLP/JSON: it has "+name+", which belong to "+paths[owner])
				}
				for _, nothing := range []string{"[]", " [ ] ", "{}", "null", "0", "false", `""`} { // lost, nothing would be
					_, err := CleanJSON(request, []byte(`{"`+name+`" : `+nothing+`,"another":[{}]}`), unbounded)
					require.NoError(t, err, nothing)
				}
			}
		}
	}
}

func TestNamesOfAnotherSignalElsewhereInJSONAreTexts(t *testing.T) {
	for _, body := range []string{
		`{"resourceSpans":[{"resource":{"attributes":[{"key":"resourceLogs","value":{"stringValue":"resourceLogs"}}]}}]}`,
		`{"resourceSpans":[{"resourceLogs":[{}]}],"another":{"resourceLogs":[{}]}}`,
		`{"another":"resourceLogs","more":"\"resourceLogs\":[{}]"}`,
		`["resourceLogs",[{}]]`, `"resourceLogs":[{}]`, `{"resourceLogs"`, `{"resourceLogs`,
	} {
		cleaned, err := CleanJSON(traces, []byte(body), unbounded)
		require.NoError(t, err)
		require.Equal(t, body, string(cleaned))
	}
}

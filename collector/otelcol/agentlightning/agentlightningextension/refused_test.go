package agentlightningextension

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/pdata/ptrace/ptraceotlp"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/key"
	"agl-otel.internal/agentlightning/internal/refusals"
)

// measured is an extension with what it counts and logs.
func measured(t *testing.T, settings map[string]any) (*stackExtension, *componenttest.Telemetry, *observer.ObservedLogs) {
	t.Helper()
	telemetry := componenttest.NewTelemetry()
	core, logged := observer.New(zap.WarnLevel)
	set := newSettings()
	set.TelemetrySettings = telemetry.NewTelemetrySettings()
	set.Logger = zap.New(core)
	return startWith(t, set, settings), telemetry, logged
}

// refusedAs gives the refused requests by reason and transport.
func refusedAs(t *testing.T, telemetry *componenttest.Telemetry) map[string]int64 {
	t.Helper()
	found, err := telemetry.GetMetric(metricRefused)
	require.NoError(t, err)
	counts := map[string]int64{}
	for _, point := range found.Data.(metricdata.Sum[int64]).DataPoints {
		reason, _ := point.Attributes.Value("reason")
		transport, _ := point.Attributes.Value("transport")
		counts[reason.AsString()+" "+transport.AsString()] = point.Value
	}
	return counts
}

func TestOverHTTPEachRefusedRequestIsCountedOnceByItsReason(t *testing.T) {
	made, telemetry, logged := measured(t, map[string]any{"max_body_bytes": 100_000})
	answers := http.StatusOK
	handler := wrapped(t, made, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.Header.Get("Content-Type"), "text/") {
			answers = http.StatusUnsupportedMediaType
		}
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(answers)
		_, _ = w.Write([]byte("the receiver's words"))
	})
	send := func(want int, request *http.Request) {
		answered := httptest.NewRecorder()
		handler.ServeHTTP(answered, request)
		require.Equal(t, want, answered.Code, answered.Body.String())
	}
	raw := rawSpan(t)
	protobuf := []string{"Content-Type", protobufType}
	send(200, post(t, "/v1/traces", raw, protobuf...))
	send(400, post(t, "/v1/traces", []byte("\xff"), protobuf...))
	send(400, post(t, "/v1/traces", raw, append(protobuf, identify.HeaderAck, "Stored")...))
	send(400, post(t, "/v1/traces", []byte(`{"resourceLogs":[{}]}`), "Content-Type", jsonType))
	send(400, post(t, "/v1/traces", []byte("no gzip"), append(protobuf, "Content-Encoding", "gzip")...))
	send(400, post(t, "/v1/traces", gzipped(raw)[:20], append(protobuf, "Content-Encoding", "gzip")...))
	send(400, post(t, "/v1/traces", bytes.Repeat([]byte("\n\x00"), 20_000), protobuf...))
	send(400, post(t, "/v1/traces", []byte("["+strings.Repeat("{},", 20_000)), "Content-Type", jsonType))
	send(415, post(t, "/v1/traces", raw, append(protobuf, "Content-Encoding", "br")...))
	send(413, post(t, "/v1/traces", make([]byte, 100_001), protobuf...))
	send(415, post(t, "/v1/traces", raw, "Content-Type", "text/xml"))
	send(403, post(t, "/v1/traces", raw, append(protobuf, "Origin", "http://evil.example")...))
	for n, of := range []int{400, 401, 403, 404, 429, 500, 503} { // of the receiver, or of what is behind it
		answers = of
		send(of, post(t, "/v1/traces", raw, append(protobuf, identify.HeaderRolloutID, string(rune('a'+n)))...))
	}
	answers = http.StatusNotFound
	send(404, post(t, "/nowhere", nil))
	answers = http.StatusMethodNotAllowed
	send(405, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/v1/traces", nil))
	answers = http.StatusOK
	send(200, post(t, "/barrier", nil))
	half := io.MultiReader(bytes.NewReader(raw[:5]), iotest.ErrReader(io.ErrUnexpectedEOF))
	request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/traces", half) // its client went away, as did the next
	request.Header.Set("Content-Type", protobufType)
	send(400, request)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	send(400, post(t, "/v1/traces", gzipped(raw), append(protobuf, "Content-Encoding", "gzip")...).WithContext(gone))

	require.Equal(t, map[string]int64{
		"malformed http": 6, "crowded http": 2, "encoding http": 1, "too_large http": 1, "content_type http": 1, "forbidden http": 2,
		"unauthorized http": 1, "unknown_path http": 3, "unavailable http": 2, "failed http": 1,
	}, refusedAs(t, telemetry))
	lines := logged.FilterMessage("refused requests")
	require.Equal(t, 10, lines.Len(), "one for each reason")
	require.Equal(t, 1, lines.FilterField(zap.String("answer", "the receiver's words")).FilterField(zap.String("reason", "content_type")).Len())
}

func TestOverGRPCEachRefusedRequestIsCountedOnceByItsReason(t *testing.T) {
	made, telemetry, _ := measured(t, map[string]any{"max_body_bytes": 100_000, "token": "secret"})
	service := &takes{}
	connection := listening(t, made, service)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer secret")
	raw := rawSpan(t)
	send := func(want codes.Code, ctx context.Context, body []byte, options ...grpc.CallOption) {
		err := connection.Invoke(ctx, exportTraces, body, new([]byte), options...)
		require.Equal(t, want, status.Code(err), err)
	}
	send(codes.OK, ctx, raw)
	send(codes.Unauthenticated, t.Context(), raw)
	send(codes.InvalidArgument, ctx, []byte("\xff"))
	send(codes.InvalidArgument, metadata.AppendToOutgoingContext(ctx, identify.HeaderAck, "Stored"), raw)
	send(codes.InvalidArgument, ctx, bytes.Repeat([]byte("\n\x00"), 20_000))
	send(codes.ResourceExhausted, ctx, make([]byte, 100_001))
	send(codes.Internal, ctx, raw, grpc.UseCompressor(broken{}.Name()))
	elsewhere := listening(t, made, service, grpc.WithCompressor(unheard{})) //nolint:staticcheck // of no registered name
	require.Equal(t, codes.Unimplemented, status.Code(sent(ctx, elsewhere, raw)))
	refused := connection.Invoke(ctx, "/no.Such/Method", raw, new([]byte))
	require.Equal(t, codes.Unimplemented, status.Code(refused))
	require.Contains(t, refused.Error(), "this port has no method /no.Such/Method; it has /opentelemetry.proto.collector.logs.v1.LogsService/Export, ")
	for n, of := range []codes.Code{codes.InvalidArgument, codes.Unavailable, codes.ResourceExhausted, codes.Internal, codes.Canceled} {
		service.err = status.Error(of, "the receiver's words")
		send(of, metadata.AppendToOutgoingContext(ctx, identify.HeaderRolloutID, string(rune('a'+n))), raw)
	}
	want := map[string]int64{
		"unauthorized grpc": 1, "malformed grpc": 4, "crowded grpc": 1, "too_large grpc": 1, "encoding grpc": 1, "unknown_path grpc": 1,
		"unavailable grpc": 2, "failed grpc": 1,
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) { // a call is counted after its client has its answer
		assert.Equal(c, want, refusedAs(t, telemetry))
	}, 10*time.Second, 10*time.Millisecond)
}

// broken is a compressor whose output cannot be unpacked.
type broken struct{}

func (broken) Name() string { return "broken" }

func (broken) Compress(w io.Writer) (io.WriteCloser, error) {
	return struct {
		io.Writer
		io.Closer
	}{w, io.NopCloser(nil)}, nil
}

func (broken) Decompress(io.Reader) (io.Reader, error) { return nil, errMembers }

func init() { encoding.RegisterCompressor(broken{}) }

// unheard is a compressor that the server does not know.
type unheard struct{}

func (unheard) Type() string { return "br" }

func (unheard) Do(w io.Writer, body []byte) error {
	_, err := w.Write(body)
	return err
}

// What the processor finds too large, the receiver answers as it answers what is malformed.
func TestARequestWhoseRowsAreTooLargeCountsAsCrowded(t *testing.T) {
	made, telemetry, _ := measured(t, nil)
	why := status.Error(codes.InvalidArgument, "its rows would take too much")
	handler := wrapped(t, made, func(w http.ResponseWriter, r *http.Request) {
		_ = refusals.Crowded(r.Context(), why)
		w.WriteHeader(http.StatusBadRequest)
	})
	answered := httptest.NewRecorder()
	handler.ServeHTTP(answered, post(t, "/v1/traces", rawSpan(t), "Content-Type", protobufType))
	require.Equal(t, http.StatusBadRequest, answered.Code)
	told := status.Convert(sent(t.Context(), listening(t, made, &crowds{err: why}), rawSpan(t)))
	require.Equal(t, []any{codes.InvalidArgument, "its rows would take too much"}, []any{told.Code(), told.Message()})
	require.Equal(t, map[string]int64{"crowded http": 1, "crowded grpc": 1}, refusedAs(t, telemetry))
}

// crowds is a receiver whose processor refuses each request for the size of its rows.
type crowds struct {
	ptraceotlp.UnimplementedGRPCServer
	err error
}

func (s *crowds) Export(ctx context.Context, _ ptraceotlp.ExportRequest) (ptraceotlp.ExportResponse, error) {
	return ptraceotlp.NewExportResponse(), refusals.Crowded(ctx, s.err)
}

func TestSendersWithoutTheTokenAreCountedByTheirTransport(t *testing.T) {
	made, telemetry, logged := measured(t, map[string]any{"token": "secret"})
	for _, ctx := range []context.Context{t.Context(), context.WithValue(t.Context(), http.ServerContextKey, &http.Server{})} {
		_, err := made.Authenticate(ctx, nil)
		require.Error(t, err)
		_, err = made.Authenticate(ctx, map[string][]string{"authorization": {"Bearer secret"}})
		require.NoError(t, err)
	}
	require.Equal(t, map[string]int64{"unauthorized grpc": 1, "unauthorized http": 1}, refusedAs(t, telemetry))
	require.Equal(t, status.Convert(errNoToken).Message(), logged.All()[0].ContextMap()["answer"])
}

func TestARefusalSaysWhatIsWrongWithTheTokenByItsFormAlone(t *testing.T) {
	closed := start(t, map[string]any{"token": "secret"})
	ids := identify.IDs{Rollout: "ro-1", Attempt: "at-1"}
	bound := key.Bound("secret", ids)
	for sent, want := range map[string]error{
		"": errNoToken, "Bearer": errNoToken, "Bearer ": errNoToken, "Bearer guess": errWrongToken, "bearer secretx": errWrongToken,
		"Bearer " + bound[:len(bound)-1]: errWrongToken, "Bearer%20" + bound: errEscaped, "Basic secret": errNoScheme, bound: errNoScheme,
	} {
		_, err := closed.Authenticate(t.Context(), map[string][]string{"authorization": {sent}})
		require.Equal(t, want, err, sent)
		require.Contains(t, status.Convert(err).Message(), "`agl-otel token --for otlp`")
	}
}

func TestAClientOfHTTP2AndAPathThatIsThereTwiceAreToldWhatToSet(t *testing.T) {
	made, telemetry, _ := measured(t, map[string]any{"collector_grpc": "10.0.0.1:4317"})
	wrap, err := made.GetHTTPHandler(t.Context())
	require.NoError(t, err)
	handler, err := wrap(t.Context(), http.NotFoundHandler())
	require.NoError(t, err)
	preface := httptest.NewRequestWithContext(t.Context(), "PRI", "*", nil)
	preface.ProtoMajor, preface.ProtoMinor = 2, 0
	for request, want := range map[*http.Request]string{
		preface:                              "gRPC is at 10.0.0.1:4317 (AGL_OTLP_GRPC_PORT)",
		post(t, "/v1/traces/v1/traces", nil): "set OTEL_EXPORTER_OTLP_ENDPOINT without /v1/traces, which SDKs add",
	} {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, request)
		require.Contains(t, answer.Body.String(), want)
	}
	require.Equal(t, map[string]int64{"other_protocol http": 1, "unknown_path http": 1}, refusedAs(t, telemetry))
}

func TestItemsThatAreRefusedAloneAreLoggedOnceAMinuteWithTheNumberSinceThen(t *testing.T) {
	made, _, logged := measured(t, nil)
	now := time.Now()
	made.refused.now = func() time.Time { return now }
	made.refused.items(2, "2 × an invalid id")
	made.refused.items(3, "3 × too old")
	now = now.Add(quietTime)
	made.refused.items(1, "1 × too old")
	lines := logged.FilterMessage("refused items").All()
	require.Len(t, lines, 2)
	require.Equal(t, map[string]any{"items": int64(2), "last": "2 × an invalid id"}, lines[0].ContextMap())
	require.Equal(t, map[string]any{"items": int64(4), "last": "1 × too old"}, lines[1].ContextMap())
}

func TestAReasonIsLoggedOnceAMinuteWithTheNumberSinceThen(t *testing.T) {
	made, _, logged := measured(t, nil)
	now := time.Now()
	made.refused.now = func() time.Time { return now }
	for range 5 {
		made.refused.add("http", reasonMalformed, "no OTLP")
	}
	made.refused.add("grpc", reasonCrowded, "too many")
	now = now.Add(quietTime)
	made.refused.add("grpc", reasonMalformed, "\x1b[2J\n\u009b"+strings.Repeat("x", 10_000))
	var lines []map[string]any
	for _, line := range logged.All() {
		require.Equal(t, zap.WarnLevel, line.Level)
		lines = append(lines, line.ContextMap())
	}
	require.Equal(t, []map[string]any{
		{"reason": "malformed", "requests": int64(1), "transport": "http", "answer": "no OTLP"},
		{"reason": "crowded", "requests": int64(1), "transport": "grpc", "answer": "too many"},
		{"reason": "malformed", "requests": int64(5), "transport": "grpc", "answer": "\ufffd[2J\ufffd\ufffd" + strings.Repeat("x", maxShown-6)},
	}, lines)
}

func TestMetadataDescribesWhatIsCounted(t *testing.T) {
	made, telemetry, _ := measured(t, nil)
	made.refused.add("http", reasonMalformed, "")
	text, err := os.ReadFile("metadata.yaml")
	require.NoError(t, err)
	var read struct {
		Attributes map[string]struct {
			Enum []string `yaml:"enum"`
		} `yaml:"attributes"`
		Telemetry struct {
			Metrics map[string]struct{ Description, Unit string } `yaml:"metrics"`
		} `yaml:"telemetry"`
	}
	require.NoError(t, yaml.Unmarshal(text, &read))
	require.Len(t, read.Telemetry.Metrics, 1)
	described := read.Telemetry.Metrics[strings.TrimPrefix(metricRefused, "otelcol_")]
	found, err := telemetry.GetMetric(metricRefused)
	require.NoError(t, err)
	require.Equal(t, []string{described.Description, described.Unit}, []string{found.Description, found.Unit})
	require.Equal(t, []string{"http", "grpc"}, read.Attributes["transport"].Enum)

	python, err := os.ReadFile("../../../refusals.py")
	require.NoError(t, err)
	reasons := []string{reasonFailed}
	for _, match := range regexp.MustCompile(`(?m)^    "([a-z_]+)",$`).FindAllStringSubmatch(string(python), -1) {
		if match[1] != "switched_off" {
			reasons = append(reasons, match[1])
		}
	}
	require.ElementsMatch(t, reasons, read.Attributes["reason"].Enum, "those of the Python collector, which has no failed, and no switched_off here")
}

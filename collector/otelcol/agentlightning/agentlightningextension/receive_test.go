package agentlightningextension

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/pdata/ptrace/ptraceotlp"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"agl-otel.internal/agentlightning/internal/identify"
)

const limit = 1 << 20

func unbounded(int64) error { return nil }

func gzipped(raw []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, _ = w.Write(raw)
	_ = w.Close()
	return out.Bytes()
}

func zstded(raw []byte) []byte {
	w, _ := zstd.NewWriter(nil, zstd.WithZeroFrames(true))
	return w.EncodeAll(raw, nil)
}

func zlibbed(raw []byte) []byte {
	var out bytes.Buffer
	w := zlib.NewWriter(&out)
	_, _ = w.Write(raw)
	_ = w.Close()
	return out.Bytes()
}

var packers = map[string]func([]byte) []byte{"gzip": gzipped, "deflate": zlibbed, "zstd": zstded, "": func(raw []byte) []byte { return raw }}

// several are those of which one may stand behind the other.
var several = map[string]func([]byte) []byte{"gzip": gzipped, "deflate": zlibbed, "zstd": zstded}

func TestWhatIsPackedIsUnpacked(t *testing.T) {
	raw := bytes.Repeat([]byte("spans "), 10_000)
	for name, pack := range packers {
		got, err := readBody(t.Context(), name, bytes.NewReader(pack(raw)), limit, unbounded)
		require.NoError(t, err, name)
		require.Equal(t, raw, got, name)
	}
	for name, pack := range several {
		packed := append(pack(raw), bytes.Repeat(pack([]byte("more")), maxMembers-1)...)
		got, err := readBody(t.Context(), name, iotest.OneByteReader(bytes.NewReader(packed)), limit, unbounded)
		require.NoError(t, err, name)
		require.Len(t, got, len(raw)+4*(maxMembers-1), name)
		require.True(t, bytes.HasSuffix(got, []byte("moremore")), name)
	}
}

func TestAPackedBodyHoldsWhatItUnfoldsTo(t *testing.T) {
	made, raw := start(t, nil), bytes.Repeat([]byte("spans "), 10_000)
	for name, pack := range packers {
		held := hold{inFlight: made.inFlight}
		got, err := made.readBody(post(t, "/v1/traces", pack(raw), "Content-Encoding", name), &held)
		require.NoError(t, err, name)
		require.Equal(t, raw, got, name)
		require.EqualValues(t, len(raw), held.bytes, name)
		held.release()
	}
	require.Zero(t, made.inFlight.bytes)
}

func TestManyMembersAreRefused(t *testing.T) {
	for name, pack := range several {
		_, err := readBody(t.Context(), name, bytes.NewReader(bytes.Repeat(pack(nil), maxMembers+1)), limit, unbounded)
		require.ErrorIs(t, err, errMembers, name)
	}
	skipped := bytes.Repeat([]byte{0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0}, maxMembers+1)
	_, err := readBody(t.Context(), "zstd", bytes.NewReader(skipped), limit, unbounded)
	require.ErrorIs(t, err, errMembers)
	for name, pack := range map[string]func([]byte) []byte{"gzip": gzipped, "zstd": zstded} { // over gRPC
		reader, err := encoding.GetCompressor(name).Decompress(bytes.NewReader(bytes.Repeat(pack(nil), maxMembers+1)))
		require.NoError(t, err, name)
		_, err = io.ReadAll(reader)
		require.ErrorIs(t, err, errMembers, name)
	}
}

func TestAWindowThatNoEncoderMayAskForIsRefusedOverGRPCToo(t *testing.T) {
	var packed bytes.Buffer
	w, err := zstd.NewWriter(&packed, zstd.WithWindowSize(4*maxWindow), zstd.WithSingleSegment(false))
	require.NoError(t, err)
	for range 2 * maxWindow >> 20 { // more than one window of the default
		_, err = w.Write(make([]byte, 1<<20))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	reader, err := encoding.GetCompressor("zstd").Decompress(&packed)
	require.NoError(t, err)
	_, err = io.ReadAll(reader)
	require.ErrorIs(t, err, zstd.ErrWindowSizeExceeded)
}

func TestWhatUnfoldsBeyondTheLimitIsRefused(t *testing.T) {
	for name, pack := range packers {
		_, err := readBody(t.Context(), name, bytes.NewReader(pack(make([]byte, limit+1))), limit, unbounded)
		var tooLarge *http.MaxBytesError
		require.ErrorAs(t, err, &tooLarge, name)
	}
}

func TestDamagedBodiesAndUnknownEncodingsAreRefused(t *testing.T) {
	for name, pack := range packers {
		packed := pack([]byte("something of some length"))
		if _, err := readBody(t.Context(), name, bytes.NewReader(packed[:len(packed)-6]), limit, unbounded); name != "" {
			require.Error(t, err, name)
		}
	}
	_, err := readBody(t.Context(), "br", strings.NewReader("x"), limit, unbounded)
	require.ErrorIs(t, err, errEncoding)
}

func TestTheWorkEndsWithItsRequest(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	endless, stop := io.Pipe()
	go func() {
		for {
			if _, err := stop.Write(gzipped(nil)); err != nil {
				return
			}
		}
	}()
	defer func() { _ = endless.CloseWithError(errors.New("done")) }()
	_, err := readBody(ctx, "gzip", io.MultiReader(bytes.NewReader(gzipped([]byte("x"))), endless), limit, unbounded)
	require.ErrorIs(t, err, context.Canceled)
}

// emptyBlocks begin a body and go on without an end, and unfold to nothing.
var emptyBlocks = map[string]struct{ head, block string }{
	"gzip":    {"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff", "\x00\x00\x00\xff\xff"},
	"deflate": {"\x78\x9c", "\x00\x00\x00\xff\xff"},
	"zstd":    {"\x28\xb5\x2f\xfd\x00\x58", "\x00\x00\x00"},
}

// packedNothing is a body of a megabyte of empty blocks.
func packedNothing(name string) io.Reader {
	return strings.NewReader(emptyBlocks[name].head + strings.Repeat(emptyBlocks[name].block, 1<<20/len(emptyBlocks[name].block)))
}

func TestUnpackingEndsWithItsTimeAlsoWhereNothingComesOut(t *testing.T) {
	now := time.Now()
	clock := func() time.Time { // a tenth of a second for each piece, half of which is waiting
		now = now.Add(50 * time.Millisecond)
		return now
	}
	for name := range emptyBlocks {
		_, err := readWatched(watch(t.Context(), packedNothing(name), clock), name, limit, unbounded)
		require.ErrorIs(t, err, errTooSlow, name)
	}
	for name, over := range map[string]encoding.Compressor{"gzip": boundedGzip{now: clock}, "zstd": boundedZstd{now: clock}} { // gRPC
		reader, err := over.Decompress(packedNothing(name))
		require.NoError(t, err, name)
		_, err = io.ReadAll(reader)
		require.ErrorIs(t, err, errTooSlow, name)
	}
}

func TestUnpackingEndsWithItsClientAlsoWhereNothingComesOut(t *testing.T) {
	for name := range emptyBlocks {
		ctx, cancel := context.WithCancel(t.Context())
		body := packedNothing(name)
		head := make([]byte, 64<<10)
		_, err := io.ReadFull(body, head)
		require.NoError(t, err)
		gone := readerOf(func(into []byte) (int, error) {
			cancel()
			return body.Read(into)
		})
		_, err = readBody(ctx, name, io.MultiReader(bytes.NewReader(head), gone), limit, unbounded)
		require.ErrorIs(t, err, context.Canceled, name)
	}
}

type readerOf func([]byte) (int, error)

func (r readerOf) Read(into []byte) (int, error) { return r(into) }

func served(t *testing.T, settings map[string]any, request *http.Request) (*httptest.ResponseRecorder, []byte) {
	t.Helper()
	wrap, err := start(t, settings).GetHTTPHandler(t.Context())
	require.NoError(t, err)
	var seen []byte
	handler, err := wrap(t.Context(), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen, err = io.ReadAll(r.Body)
		w.WriteHeader(http.StatusTeapot)
	}))
	require.NoError(t, err)
	recorder := httptest.NewRecorder()
	handler.ServeHTTP(recorder, request)
	return recorder, seen
}

func post(t *testing.T, path string, body []byte, headers ...string) *http.Request {
	t.Helper()
	request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, bytes.NewReader(body))
	for i := 0; i < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	return request
}

// badTraces is a request whose second span has a trace id of three bytes.
func badTraces(t *testing.T) []byte {
	t.Helper()
	request := ptrace.NewTraces()
	spans := request.ResourceSpans().AppendEmpty().ScopeSpans().AppendEmpty().Spans()
	for range 2 {
		span := spans.AppendEmpty()
		span.SetTraceID(pcommon.TraceID(bytes.Repeat([]byte{1}, 16)))
		span.SetSpanID(pcommon.SpanID{2})
	}
	raw, err := ptraceotlp.NewExportRequestFromTraces(request).MarshalProto()
	require.NoError(t, err)
	at := bytes.LastIndex(raw, append([]byte{0x0a, 16}, bytes.Repeat([]byte{1}, 16)...))
	raw[at+1] = 3 // bytes of the id; what is left of the sixteen becomes another field
	return append(raw[:at+2], append([]byte{1, 1, 1, 0xfa, 0x01, 10}, raw[at+8:]...)...)
}

func TestOneBadSpanDoesNotRefuseItsRequest(t *testing.T) {
	raw := badTraces(t)
	require.Error(t, ptraceotlp.NewExportRequest().UnmarshalProto(raw))
	good := func(body []byte) {
		t.Helper()
		request := ptraceotlp.NewExportRequest()
		require.NoError(t, request.UnmarshalProto(body))
		spans := request.Traces().ResourceSpans().At(0).ScopeSpans().At(0).Spans()
		require.Equal(t, 2, spans.Len())
		reason, _ := spans.At(1).Attributes().Get(identify.AttrInvalid)
		require.Equal(t, identify.ReasonTraceID, reason.Str())
	}
	answered, seen := served(t, nil, post(t, "/v1/traces", gzipped(raw), "Content-Type", protobufType, "Content-Encoding", "gzip"))
	require.Equal(t, http.StatusTeapot, answered.Code)
	good(seen)

	request := &recorded{}
	codec := &cleaningCodec{CodecV2: encoding.GetCodecV2("proto"), inFlight: &inFlight{limit: limit}}
	require.NoError(t, codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(raw)}, (*ExportTraceServiceRequest)(request)))
	good(request.raw)
}

type recorded struct{ raw []byte }

// ExportTraceServiceRequest is called as the receiver's own type is.
type ExportTraceServiceRequest recorded

func (r *ExportTraceServiceRequest) UnmarshalProto(raw []byte) error {
	r.raw = bytes.Clone(raw)
	return nil
}

func TestARefusalIsAStatusInTheSendersEncoding(t *testing.T) {
	for _, refused := range []struct {
		encoding string
		body     []byte
		code     int
	}{
		{"gzip", []byte("no gzip at all"), http.StatusBadRequest},
		{"br", []byte("x"), http.StatusUnsupportedMediaType},
		{"gzip", gzipped(make([]byte, 2000)), http.StatusRequestEntityTooLarge},
	} {
		headers := []string{"Content-Type", protobufType, "Content-Encoding", refused.encoding}
		answered, _ := served(t, map[string]any{"max_body_bytes": 1000}, post(t, "/v1/logs", refused.body, headers...))
		require.Equal(t, refused.code, answered.Code)
		var body spb.Status
		require.NoError(t, proto.Unmarshal(answered.Body.Bytes(), &body))
		require.NotEmpty(t, body.GetMessage())
	}
	crowded := gzipped(bytes.Repeat([]byte("\n\x00"), limit))
	answered, seen := served(t, nil, post(t, "/v1/metrics", crowded, "Content-Type", protobufType, "Content-Encoding", "gzip"))
	require.Equal(t, http.StatusBadRequest, answered.Code)
	require.Contains(t, answered.Body.String(), "it has more than 65536 resources, scopes and items in 2097152 bytes: send smaller batches")
	require.Empty(t, seen)
	answered, _ = served(t, nil, post(t, "/v1/traces", []byte("["), "Content-Type", jsonType, "Content-Encoding", "br"))
	require.JSONEq(t, `{"code":3,"message":"`+errEncoding.Error()+`"}`, answered.Body.String())
	answered, seen = served(t, nil, post(t, "/v1/traces", []byte(`{"resourceLogs":[{}]}`), "Content-Type", jsonType))
	require.Equal(t, http.StatusBadRequest, answered.Code)
	require.Contains(t, answered.Body.String(), "it has resourceLogs, which belong to /v1/logs")
	require.Empty(t, seen)
}

// The words are those of the Python collector.
func TestAnUnknownAckLevelIsRefused(t *testing.T) {
	made := start(t, nil)
	service := &takes{}
	connection := listening(t, made, service)
	handler := wrapped(t, made, func(http.ResponseWriter, *http.Request) { service.times++ })
	for level, shown := range map[string]string{"Stored": "'Stored'", `s"`: `'s\"'`, strings.Repeat("x", 200): "'" + strings.Repeat("x", 99)} {
		why := "there is no ack level " + shown + ": agl-ack is durable (as without it) or stored"
		refused := status.Convert(sent(metadata.AppendToOutgoingContext(t.Context(), identify.HeaderAck, level), connection, rawSpan(t)))
		require.Equal(t, []any{codes.InvalidArgument, why}, []any{refused.Code(), refused.Message()})
		answered := httptest.NewRecorder()
		handler.ServeHTTP(answered, post(t, "/v1/traces", rawSpan(t), "Content-Type", protobufType, identify.HeaderAck, level))
		require.Equal(t, http.StatusBadRequest, answered.Code)
		var body spb.Status
		require.NoError(t, proto.Unmarshal(answered.Body.Bytes(), &body))
		require.Equal(t, []any{int32(codes.InvalidArgument), why}, []any{body.GetCode(), body.GetMessage()})
	}
	require.Zero(t, service.times)
	for _, level := range []string{"", "durable", "stored"} {
		headers := []string{identify.HeaderAck, level, identify.HeaderRolloutID, "ro" + level} // other ids: no resend
		require.NoError(t, sent(metadata.AppendToOutgoingContext(t.Context(), headers...), connection, rawSpan(t)))
		answered := httptest.NewRecorder()
		handler.ServeHTTP(answered, post(t, "/v1/traces", rawSpan(t), append(headers, "Content-Type", protobufType)...))
		require.Equal(t, http.StatusOK, answered.Code)
	}
	require.Equal(t, 6, service.times)
}

func TestPagesOfOthersAndOtherNamesAreRefused(t *testing.T) {
	loopback := map[string]any{"host": "127.0.0.1", "allowed_hosts": "mine.example, other.example", "collector_http": "http://agent.internal:4318"}
	open, token := map[string]any{"host": "0.0.0.0"}, map[string]any{"host": "127.0.0.1", "token": "secret"}
	for _, asked := range []struct {
		settings     map[string]any
		host, origin string
		code         int
	}{
		{loopback, "evil.example:4318", "", http.StatusForbidden},
		{loopback, "127.0.0.1:4318", "", http.StatusOK},
		{loopback, "[::1]:4318", "", http.StatusOK},
		{loopback, "LOCALHOST:4318", "", http.StatusOK},
		{loopback, "Mine.Example:4318", "", http.StatusOK},
		{loopback, "agent.internal:4318", "", http.StatusOK},
		{map[string]any{"host": "LOCALHOST"}, "evil.example:4318", "", http.StatusForbidden}, // a name of a loopback address
		{map[string]any{"host": "LOCALHOST", "allowed_hosts": ",mine.example"}, "mine.example", "", http.StatusOK},
		{map[string]any{"host": "localhost", "allowed_hosts": "*"}, "evil.example", "", http.StatusOK},
		{open, "evil.example:4318", "", http.StatusOK},
		{token, "evil.example:4318", "", http.StatusOK},
		{loopback, "127.0.0.1:4318", "http://evil.example", http.StatusForbidden},
		{loopback, "127.0.0.1:4318", "null", http.StatusForbidden},
		{loopback, "127.0.0.1:4318", "http://127.0.0.1:4318", http.StatusOK},
		{open, "10.0.0.1", "http://evil.example", http.StatusForbidden},
		{token, "10.0.0.1", "http://evil.example", http.StatusForbidden},
	} {
		settings := map[string]any{"queue": map[string]any{"endpoint": "127.0.0.1:1"}}
		for name, value := range asked.settings {
			settings[name] = value
		}
		request := post(t, "/barrier", nil)
		request.Host = asked.host
		if asked.origin != "" {
			request.Header.Set("Origin", asked.origin)
		}
		answered, _ := served(t, settings, request)
		require.Equal(t, asked.code, answered.Code, "%s %s", asked.host, asked.origin)
	}
}

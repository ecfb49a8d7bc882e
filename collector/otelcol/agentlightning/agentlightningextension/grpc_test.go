package agentlightningextension

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/ptrace/ptraceotlp"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
)

const exportTraces = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

// listening serves with the options of this extension, and gives a client that sends bytes as they are.
func listening(t *testing.T, made *stackExtension, service ptraceotlp.GRPCServer, dialing ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	options, err := made.GetGRPCServerOptions(t.Context())
	require.NoError(t, err)
	server := grpc.NewServer(options...)
	ptraceotlp.RegisterGRPCServer(server, service)
	listener := bufconn.Listen(1 << 20)
	var group sync.WaitGroup
	group.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(group.Wait)
	t.Cleanup(server.Stop)
	connection, err := grpc.NewClient("passthrough:///here", append(dialing, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(asItIs{})),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = connection.Close() })
	return connection
}

// asItIs is a codec of bytes.
type asItIs struct{}

func (asItIs) Name() string { return "proto" }
func (asItIs) Marshal(from any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(from.([]byte))}, nil
}
func (asItIs) Unmarshal(data mem.BufferSlice, into any) error {
	*into.(*[]byte) = data.Materialize()
	return nil
}

func sent(ctx context.Context, connection *grpc.ClientConn, body []byte) error {
	return connection.Invoke(ctx, exportTraces, body, new([]byte))
}

func rawSpan(t *testing.T) []byte {
	t.Helper()
	raw, err := oneSpan().MarshalProto()
	require.NoError(t, err)
	return raw
}

func TestOverGRPCTheTokenIsAskedForBeforeABodyIsSent(t *testing.T) {
	service := &takes{}
	connection := listening(t, start(t, map[string]any{"token": "secret"}), service)
	for _, shown := range []string{"", "Bearer guess"} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", shown)
		stream, err := connection.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, exportTraces)
		require.NoError(t, err)
		require.Equal(t, codes.Unauthenticated, status.Code(stream.RecvMsg(new([]byte))), "nothing was sent but the headers")
	}
	require.Zero(t, service.times)
	require.NoError(t, sent(metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer secret"), connection, rawSpan(t)))
	require.Equal(t, 1, service.times)
}

func TestOverGRPCWhatCannotBeTakenIsAnInvalidArgument(t *testing.T) {
	made := start(t, nil)
	service := &takes{}
	connection := listening(t, made, service)
	for body, why := range map[string]string{
		string(bytes.Repeat([]byte("\n\x00"), limit)): "it has more than 65536 resources, scopes and items in 2097152 bytes: send smaller batches",
		"no protobuf": "",
	} {
		err := sent(t.Context(), connection, []byte(body))
		require.Equal(t, codes.InvalidArgument, status.Code(err))
		require.Contains(t, err.Error(), why)
	}
	require.Zero(t, service.times)
	require.NoError(t, sent(t.Context(), connection, rawSpan(t)))
	require.Zero(t, made.inFlight.bytes)
}

// waits holds a request until it is told to go on.
type waits struct {
	ptraceotlp.UnimplementedGRPCServer
	begun, end chan struct{}
}

func (s *waits) Export(context.Context, ptraceotlp.ExportRequest) (ptraceotlp.ExportResponse, error) {
	s.begun <- struct{}{}
	<-s.end
	return ptraceotlp.NewExportResponse(), nil
}

func TestRequestsThatFindNoRoomAreToBeSentAgain(t *testing.T) {
	made := start(t, map[string]any{"max_in_flight_bytes": 500})
	service := &waits{begun: make(chan struct{}), end: make(chan struct{})}
	connection := listening(t, made, service)
	large, small := append(rawSpan(t), append([]byte("\x12\xf4\x03"), make([]byte, 500)...)...), rawSpan(t)
	first := make(chan error)
	go func() { first <- sent(t.Context(), connection, large) }() // alone, it is always let in
	<-service.begun

	refused := status.Convert(sent(t.Context(), connection, small))
	require.Equal(t, codes.Unavailable, refused.Code())
	require.Contains(t, refused.Message(), "AGL_MAX_IN_FLIGHT_BYTES 500")
	require.Len(t, refused.Details(), 1, "when to send it again")
	wrap, err := made.GetHTTPHandler(t.Context())
	require.NoError(t, err)
	handler, err := wrap(t.Context(), http.NotFoundHandler())
	require.NoError(t, err)
	for name, pack := range packers {
		answered := httptest.NewRecorder()
		handler.ServeHTTP(answered, post(t, "/v1/traces", pack(small), "Content-Type", protobufType, "Content-Encoding", name))
		require.Equal(t, http.StatusServiceUnavailable, answered.Code, name)
		require.Equal(t, "1", answered.Header().Get("Retry-After"))
		var told spb.Status
		require.NoError(t, proto.Unmarshal(answered.Body.Bytes(), &told))
		require.Equal(t, int32(codes.Unavailable), told.GetCode())
	}

	close(service.end)
	require.NoError(t, <-first)
	go func() { <-service.begun }()
	require.NoError(t, sent(t.Context(), connection, small))
	require.Zero(t, made.inFlight.bytes)
}

// Without a turn a message that unfolds to a little is read, and a larger one waits.
func TestOnlySomeLargeMessagesAreUnpackedAtOneTime(t *testing.T) {
	for range maxTurns {
		turns <- struct{}{}
	}
	now := time.Now()
	over := boundedGzip{now: func() time.Time { return now }}
	small, err := over.Decompress(bytes.NewReader(gzipped(make([]byte, littleBytes/2))))
	require.NoError(t, err)
	_, err = io.ReadAll(small)
	require.NoError(t, err)
	large, err := over.Decompress(bytes.NewReader(gzipped(make([]byte, 3*littleBytes))))
	require.NoError(t, err)
	_, err = io.ReadFull(large, make([]byte, littleBytes+1))
	require.NoError(t, err)
	rest := make(chan int)
	go func() {
		all, _ := io.ReadAll(large)
		rest <- len(all)
	}()
	select {
	case <-rest:
		t.Error("it did not wait")
	default:
	}
	<-turns
	require.Equal(t, 2*littleBytes-1, <-rest)
	require.Len(t, turns, maxTurns, "until it is closed it keeps its turn")
	require.NoError(t, large.(io.Closer).Close())
	require.Len(t, turns, maxTurns-1)
	for range maxTurns - 1 {
		<-turns
	}
}

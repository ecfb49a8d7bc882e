package agentlightningextension

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/client"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/pdata/ptrace/ptraceotlp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/key"
	"agl-otel.internal/agentlightning/internal/refusals"
)

func opened(t *testing.T, folder string, now func() time.Time) *resends {
	t.Helper()
	made, err := openResends(folder, now, zap.NewNop())
	require.NoError(t, err)
	t.Cleanup(made.close)
	return made
}

func never(t *testing.T) func(context.Context) (outcome, error) {
	return func(context.Context) (outcome, error) {
		t.Error("a resend was taken again")
		return outcome{}, nil
	}
}

func gives(answer outcome) func(context.Context) (outcome, error) {
	return func(context.Context) (outcome, error) { return answer, nil }
}

func TestAResendGetsTheFirstOnesOutcomeAfterARestartToo(t *testing.T) {
	folder := t.TempDir()
	first := opened(t, folder, time.Now)
	sent := outcome{2, "2 × why"}
	found, err := first.once(t.Context(), requestKey{1}, gives(sent))
	require.NoError(t, err)
	require.Equal(t, sent, found)
	// not closed: the process was killed, in the middle of a line
	torn, err := os.OpenFile(filepath.Join(folder, "00000001.resends"), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = torn.WriteString(`["02`)
	require.NoError(t, err)
	require.NoError(t, torn.Close())
	for range 2 { // what was read at a start outlives the next one
		again := opened(t, folder, time.Now)
		found, err = again.once(t.Context(), requestKey{1}, never(t))
		require.NoError(t, err)
		require.Equal(t, sent, found)
	}
	files, err := filepath.Glob(filepath.Join(folder, "*"))
	require.NoError(t, err)
	require.Len(t, files, 1)
	info, err := os.Stat(files[0])
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
}

func TestAFlippedBitOfTheJournalCostsALineAndIsSaidOnce(t *testing.T) {
	sent := map[requestKey]outcome{{1}: {2, "2 × why"}, {2}: {}}
	folder := t.TempDir()
	first := opened(t, folder, time.Now)
	for key, answer := range sent {
		_, err := first.once(t.Context(), key, gives(answer))
		require.NoError(t, err)
	}
	raw, err := os.ReadFile(filepath.Join(folder, "00000001.resends"))
	require.NoError(t, err)
	folder = t.TempDir()
	for bit := range 8 * len(raw) {
		flipped := bytes.Clone(raw)
		flipped[bit/8] ^= 1 << (bit % 8)
		require.NoError(t, os.WriteFile(filepath.Join(folder, "00000001.resends"), flipped, 0o600))
		core, said := observer.New(zap.WarnLevel)
		for range 2 { // the second start finds no trace of it
			made, err := openResends(folder, time.Now, zap.New(core))
			require.NoError(t, err)
			for key, one := range made.known {
				require.Equal(t, sent[key], one.outcome, "bit %d", bit)
			}
			if raw[bit/8] != '\n' { // without its newline a line takes the next with it
				require.Len(t, made.known, 1, "bit %d", bit)
			}
			made.close()
		}
		require.Equal(t, 1, said.Len(), "bit %d", bit)
		files, err := filepath.Glob(filepath.Join(folder, "*"))
		require.NoError(t, err)
		require.NoError(t, os.Remove(files[0]))
	}
}

func TestAfterTenMinutesARequestIsNew(t *testing.T) {
	folder := t.TempDir()
	now := time.Now()
	clock := func() time.Time { return now }
	first := opened(t, folder, clock)
	_, err := first.once(t.Context(), requestKey{1}, gives(outcome{1, "old"}))
	require.NoError(t, err)
	now = now.Add(resendTime + time.Second)
	for _, each := range []*resends{first, opened(t, folder, clock)} {
		found, err := each.once(t.Context(), requestKey{1}, gives(outcome{}))
		require.NoError(t, err)
		require.Equal(t, outcome{}, found)
	}
	require.Len(t, first.known, 1)
	require.Len(t, first.order, 1)
}

func TestTheJournalForgetsItsOldestFiles(t *testing.T) {
	folder := t.TempDir()
	now := time.Now()
	made := opened(t, folder, func() time.Time { return now })
	for n := range 6 {
		now = now.Add(resendTime + time.Second)
		_, err := made.once(t.Context(), requestKey{byte(n)}, gives(outcome{}))
		require.NoError(t, err)
	}
	files, err := filepath.Glob(filepath.Join(folder, "*"))
	require.NoError(t, err)
	require.Len(t, files, journalFiles)
}

func TestAResendOfWhatIsUnderWayWaitsForItsOutcome(t *testing.T) {
	made := opened(t, t.TempDir(), time.Now)
	ctx, hangUp := context.WithCancel(t.Context())
	began, end := make(chan struct{}), make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		_, err := made.once(ctx, requestKey{1}, func(inner context.Context) (outcome, error) {
			close(began)
			<-end
			return outcome{1, "x"}, inner.Err()
		})
		if err != nil { // what has begun comes to its end without its client
			t.Error(err)
		}
	})
	<-began
	hangUp()
	group.Go(func() {
		found, err := made.once(t.Context(), requestKey{1}, never(t))
		if err != nil || found.rejected != 1 {
			t.Error(found, err)
		}
	})
	close(end)
	group.Wait()
}

func TestWhatFailedMayBeSentAgain(t *testing.T) {
	made := opened(t, t.TempDir(), time.Now)
	_, err := made.once(t.Context(), requestKey{1}, func(context.Context) (outcome, error) { return outcome{}, errors.New("away") })
	require.ErrorContains(t, err, "away")
	require.Panics(t, func() {
		_, _ = made.once(t.Context(), requestKey{1}, func(context.Context) (outcome, error) { panic("broken") })
	})
	found, err := made.once(t.Context(), requestKey{1}, gives(outcome{3, ""}))
	require.NoError(t, err)
	require.Equal(t, int64(3), found.rejected)
}

func TestRequestsThatEndTogetherAreAllInTheJournal(t *testing.T) {
	folder := t.TempDir()
	made := opened(t, folder, time.Now)
	var group sync.WaitGroup
	for n := range 200 {
		group.Go(func() {
			if _, err := made.once(t.Context(), requestKey{byte(n), 1}, gives(outcome{int64(n), ""})); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	again := opened(t, folder, time.Now)
	for n := range 200 {
		found, err := again.once(t.Context(), requestKey{byte(n), 1}, never(t))
		require.NoError(t, err)
		require.Equal(t, int64(n), found.rejected)
	}
}

func TestAFolderThatCannotBeUsedIsNamed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	made, err := NewFactory().Create(t.Context(), newSettings(), &Config{Resends: file})
	require.NoError(t, err)
	require.ErrorContains(t, made.Start(t.Context(), componenttest.NewNopHost()), file)
}

func TestADiskThatFailsDoesNotRefuseWhatIsStored(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "journal")
	now := time.Now()
	made := opened(t, folder, func() time.Time { return now })
	require.NoError(t, os.RemoveAll(folder))
	now = now.Add(2 * resendTime) // the next answer wants a new file
	for n := range 2 {
		_, err := made.once(t.Context(), requestKey{byte(n)}, gives(outcome{}))
		require.NoError(t, err)
	}
}

// oneSpan is a request.
func oneSpan() ptraceotlp.ExportRequest {
	request := ptrace.NewTraces()
	request.ResourceSpans().AppendEmpty().ScopeSpans().AppendEmpty().Spans().AppendEmpty().SetName("work")
	return ptraceotlp.NewExportRequestFromTraces(request)
}

func TestOverHTTPARequestIsTakenOnceAndTheSenderToldWhatWasRefused(t *testing.T) {
	made := start(t, map[string]any{"resends": t.TempDir()})
	wrap, err := made.GetHTTPHandler(t.Context())
	require.NoError(t, err)
	code, times := http.StatusServiceUnavailable, 0
	handler, err := wrap(t.Context(), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		times++
		refusals.Add(r.Context(), identify.ReasonKey, 2)
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(code)
		_, _ = w.Write([]byte("the receiver's"))
	}))
	require.NoError(t, err)
	raw, err := oneSpan().MarshalProto()
	require.NoError(t, err)
	text, err := oneSpan().MarshalJSON()
	require.NoError(t, err)
	send := func(body []byte, bound *identify.IDs, headers ...string) *httptest.ResponseRecorder {
		request := post(t, "/v1/traces", body, headers...)
		if bound != nil {
			request = request.WithContext(client.NewContext(request.Context(), client.Info{Auth: key.Holder{IDs: *bound}}))
		}
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, request)
		return recorder
	}
	failed := send(raw, nil, "Content-Type", protobufType)
	require.Equal(t, []any{code, "7", "the receiver's"}, []any{failed.Code, failed.Header().Get("Retry-After"), failed.Body.String()})
	code = http.StatusOK
	message := "2 × " + identify.ReasonKey
	for _, body := range [][]byte{raw, gzipped(raw), raw} {
		headers := []string{"Content-Type", protobufType}
		if body[0] == 0x1f {
			headers = append(headers, "Content-Encoding", "gzip")
		}
		answered := send(body, nil, headers...)
		require.Equal(t, http.StatusOK, answered.Code)
		told := ptraceotlp.NewExportResponse()
		require.NoError(t, told.UnmarshalProto(answered.Body.Bytes()))
		require.Equal(t, int64(2), told.PartialSuccess().RejectedSpans())
		require.Equal(t, message, told.PartialSuccess().ErrorMessage())
	}
	require.Equal(t, 2, times)
	for range 2 {
		told := ptraceotlp.NewExportResponse()
		answered := send(text, nil, "Content-Type", jsonType)
		require.NoError(t, told.UnmarshalJSON(answered.Body.Bytes()))
		require.Equal(t, message, told.PartialSuccess().ErrorMessage())
	}
	require.Equal(t, 3, times)
	_ = send(raw, &identify.IDs{Rollout: "ro", Attempt: "at"}, "Content-Type", protobufType)
	_ = send(raw, nil, "Content-Type", protobufType, identify.HeaderRolloutID, "ro")
	require.Equal(t, 5, times, "other ids make another request")
	_ = send(raw, &identify.IDs{}, "Content-Type", protobufType)
	require.Equal(t, 6, times, "and so does a key that is bound to no attempt, in the token's place")
}

type takes struct {
	ptraceotlp.UnimplementedGRPCServer
	times int
	err   error
}

func (s *takes) Export(ctx context.Context, _ ptraceotlp.ExportRequest) (ptraceotlp.ExportResponse, error) {
	s.times++
	refusals.Add(ctx, identify.ReasonKey, 1)
	return ptraceotlp.NewExportResponse(), s.err
}

func TestOverGRPCARequestIsTakenOnceAndTheSenderToldWhatWasRefused(t *testing.T) {
	options, err := start(t, map[string]any{"max_body_bytes": 1000}).GetGRPCServerOptions(t.Context())
	require.NoError(t, err)
	server := grpc.NewServer(options...)
	service := &takes{err: status.Error(codes.Unavailable, "away")}
	ptraceotlp.RegisterGRPCServer(server, service)
	listener := bufconn.Listen(1 << 20)
	var group sync.WaitGroup
	group.Go(func() { _ = server.Serve(listener) })
	defer group.Wait()
	defer server.Stop()
	connection, err := grpc.NewClient("passthrough:///here", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	require.NoError(t, err)
	defer func() { _ = connection.Close() }()
	sender := ptraceotlp.NewGRPCClient(connection)
	_, err = sender.Export(t.Context(), oneSpan())
	require.Equal(t, codes.Unavailable, status.Code(err))
	service.err = nil
	for range 2 {
		told, err := sender.Export(t.Context(), oneSpan())
		require.NoError(t, err)
		require.Equal(t, int64(1), told.PartialSuccess().RejectedSpans())
		require.Equal(t, fmt.Sprintf("1 × %s", identify.ReasonKey), told.PartialSuccess().ErrorMessage())
	}
	require.Equal(t, 2, service.times)
	large := oneSpan()
	large.Traces().ResourceSpans().At(0).Resource().Attributes().PutStr("k", string(make([]byte, 1000)))
	_, err = sender.Export(t.Context(), large)
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
}

package agentlightningextension

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/client"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/extension"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/key"
	"agl-otel.internal/agentlightning/internal/queuepb"
	"agl-otel.internal/agentlightning/internal/queuetest"
)

func newSettings() extension.Settings {
	return extension.Settings{ID: component.NewID(Type), TelemetrySettings: componenttest.NewNopTelemetrySettings()}
}

func start(t *testing.T, settings map[string]any) *stackExtension {
	t.Helper()
	return startWith(t, newSettings(), settings)
}

func startWith(t *testing.T, set extension.Settings, settings map[string]any) *stackExtension {
	t.Helper()
	factory := NewFactory()
	config := factory.CreateDefaultConfig()
	require.NoError(t, confmap.NewFromStringMap(settings).Unmarshal(config))
	require.NoError(t, confmap.Validate(config))
	made, err := factory.Create(t.Context(), set, config)
	require.NoError(t, err)
	require.NoError(t, made.Start(t.Context(), componenttest.NewNopHost()))
	t.Cleanup(func() { made.(*stackExtension).resends.close() })
	return made.(*stackExtension)
}

func describe(t *testing.T, queue *queuetest.Queue) *queuepb.DescribeResponse {
	t.Helper()
	answer, err := queue.Client.Describe(t.Context(), &queuepb.DescribeRequest{})
	require.NoError(t, err)
	return answer
}

func TestACollectorIsFoundThroughTheQueueUntilItStops(t *testing.T) {
	queue := queuetest.Start(t, "")
	made := start(t, map[string]any{
		"queue":          map[string]any{"endpoint": queue.Address},
		"collector_grpc": "10.0.0.1:4317", "collector_http": "http://10.0.0.1:4318", "clickhouse": "http://10.0.0.2:8123",
	})
	require.Eventually(t, func() bool { return describe(t, queue).GetAddresses()["collector_grpc"] == "10.0.0.1:4317" },
		time.Minute, 10*time.Millisecond)
	require.Equal(t, []string{"http://10.0.0.1:4318"}, describe(t, queue).GetCollectors())
	require.Equal(t, "http://10.0.0.2:8123", describe(t, queue).GetAddresses()["clickhouse"])
	require.NoError(t, made.Shutdown(t.Context()))
	require.Empty(t, describe(t, queue).GetCollectors())
}

func TestWithoutAddressesNothingIsAnnounced(t *testing.T) {
	made := start(t, nil)
	require.Nil(t, made.client)
	require.NoError(t, made.Shutdown(t.Context()))
}

func TestAQueueThatIsAwayHoldsUpNeitherStartNorStop(t *testing.T) {
	made := start(t, map[string]any{"queue": map[string]any{"endpoint": "127.0.0.1:1"}, "collector_grpc": "10.0.0.1:4317"})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	require.NoError(t, made.Shutdown(ctx))
}

func TestBarrierAndHealthAreAnsweredBesideWhatTheReceiverServes(t *testing.T) {
	wrap, err := start(t, nil).GetHTTPHandler(t.Context())
	require.NoError(t, err)
	base := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	handler, err := wrap(t.Context(), base)
	require.NoError(t, err)
	for _, asked := range []struct {
		method, path string
		status       int
	}{
		{http.MethodPost, "/barrier", http.StatusOK},
		{http.MethodGet, "/health", http.StatusOK},
		{http.MethodPost, "/v1/traces", http.StatusTeapot},
		{http.MethodGet, "/barrier", http.StatusTeapot},
	} {
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), asked.method, asked.path, nil))
		require.Equal(t, asked.status, recorder.Code, asked.path)
	}
}

func TestWrongAddressesAreNamed(t *testing.T) {
	for _, wrong := range []map[string]any{{"collector_http": "10.0.0.1:4318"}, {"clickhouse": "http://host:8123/db"}} {
		config := NewFactory().CreateDefaultConfig()
		require.NoError(t, confmap.NewFromStringMap(wrong).Unmarshal(config))
		require.ErrorContains(t, confmap.Validate(config), "must be http://host:port")
	}
}

func TestAnAddressWithoutAHostIsNamed(t *testing.T) {
	for _, wrong := range []map[string]any{
		{"collector_http": "http://:4318"}, {"collector_grpc": ":4317"}, {"collector_grpc": "https://host"},
	} {
		config := NewFactory().CreateDefaultConfig()
		require.NoError(t, confmap.NewFromStringMap(wrong).Unmarshal(config))
		require.ErrorContains(t, confmap.Validate(config), "host:port")
	}
}

func TestSendersMustShowTheTokenWhereThereIsOne(t *testing.T) {
	open, closed := start(t, nil), start(t, map[string]any{"token": "secret"})
	for _, sent := range []map[string][]string{nil, {"authorization": {"Bearer guess"}}, {"authorization": {"secret"}}, {"x": {"Bearer secret"}}} {
		_, err := open.Authenticate(t.Context(), sent)
		require.NoError(t, err)
		_, err = closed.Authenticate(t.Context(), sent)
		require.Equal(t, codes.Unauthenticated, status.Code(err))
	}
	for _, name := range []string{"authorization", "Authorization"} {
		_, err := closed.Authenticate(t.Context(), map[string][]string{name: {"Bearer secret"}})
		require.NoError(t, err)
	}
}

func TestAgentsSendWithAKeyMadeFromTheToken(t *testing.T) {
	closed := start(t, map[string]any{"token": "secret"})
	// What agl_otel.net.auth.ingest_key("secret") gives.
	ctx, err := closed.Authenticate(t.Context(), map[string][]string{"authorization": {"Bearer agl-172fbf46d31bf63b7f3c3ad4ec3cfeaed9ef4214"}})
	require.NoError(t, err)
	require.True(t, key.OfAgent(client.FromContext(ctx)))
	require.Nil(t, key.BoundTo(client.FromContext(ctx)))
	_, err = closed.Authenticate(t.Context(), map[string][]string{"authorization": {"bearer secret"}})
	require.NoError(t, err, "the case of the scheme does not matter")
	ctx, err = closed.Authenticate(t.Context(), map[string][]string{"authorization": {"Bearer secret"}})
	require.NoError(t, err)
	require.False(t, key.OfAgent(client.FromContext(ctx)))
}

func TestAKeyBoundToAnAttemptIsKnownByIt(t *testing.T) {
	closed := start(t, map[string]any{"token": "secret"})
	ids := identify.IDs{Rollout: "ro-1", Attempt: "at-1"}
	shown := key.Bound("secret", ids)
	ctx, err := closed.Authenticate(t.Context(), map[string][]string{"Authorization": {"Bearer " + shown}})
	require.NoError(t, err)
	require.Equal(t, &ids, key.BoundTo(client.FromContext(ctx)))
	for _, forged := range []string{shown[:len(shown)-1] + "x", strings.Replace(shown, "at-1", "at-2", 1), key.Bound("other", ids)} {
		_, err := closed.Authenticate(t.Context(), map[string][]string{"authorization": {"Bearer " + forged}})
		require.Equal(t, codes.Unauthenticated, status.Code(err), forged)
	}
}

func TestAnExporterShowsTheSameToken(t *testing.T) {
	for token, sent := range map[string]map[string]string{"": nil, "secret": {"authorization": "Bearer secret"}} {
		credentials, err := start(t, map[string]any{"token": token}).PerRPCCredentials()
		require.NoError(t, err)
		metadata, err := credentials.GetRequestMetadata(t.Context())
		require.NoError(t, err)
		require.Equal(t, sent, metadata)
	}
}

package agentlightningextension

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/client"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/key"
)

func TestPagesOfOtherSitesLearnNothingFromHowLongAReadTakes(t *testing.T) {
	for _, token := range []string{"", "secret"} {
		wrap, err := start(t, map[string]any{"token": token, "host": "127.0.0.1"}).GetHTTPHandler(t.Context())
		require.NoError(t, err)
		handler, err := wrap(t.Context(), http.NotFoundHandler())
		require.NoError(t, err)
		for site, status := range map[string]int{"cross-site": 403, "same-site": 403, "same-origin": 200, "none": 200, "": 200} {
			for _, mode := range []string{"no-cors", "cors", "navigate"} {
				request := httptest.NewRequest(http.MethodGet, "http://127.0.0.1:4318/health", nil)
				request.Header.Set("Sec-Fetch-Site", site)
				request.Header.Set("Sec-Fetch-Mode", mode)
				answer := httptest.NewRecorder()
				handler.ServeHTTP(answer, request)
				require.Equal(t, status, answer.Code, site)
				require.Equal(t, "same-origin", answer.Header().Get("Cross-Origin-Resource-Policy"))
			}
		}
	}
}

func TestBrowsersSayNothingOfWhosePageAsksForNoAddress(t *testing.T) {
	own := ownPages{map[string]bool{}}
	for host, refused := range map[string]bool{"0.0.0.0:4318": true, "[::]:4318": true, "127.0.0.1:4318": false, "[::1]:4318": false} {
		require.Equal(t, refused, own.refusal(httptest.NewRequest(http.MethodGet, "http://"+host+"/health", nil)) != "", host)
	}
}

func TestAKeyStaysBoundWhateverIsSentBesideIt(t *testing.T) {
	closed := start(t, map[string]any{"token": "secret"})
	ids := identify.IDs{Rollout: "ro-1", Attempt: "at-1"}
	own, junk := "Bearer "+key.Bound("secret", ids), "Bearer x"
	for _, shown := range [][]string{{own, junk}, {junk, own}, {own, own}} {
		ctx, err := closed.Authenticate(t.Context(), map[string][]string{"Authorization": shown})
		require.NoError(t, err)
		require.Equal(t, &ids, key.BoundTo(client.FromContext(ctx)))
	}
}

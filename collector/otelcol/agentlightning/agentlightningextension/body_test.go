package agentlightningextension

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const shortTime = 200 * time.Millisecond

// serving is a server of the extension before a receiver that does what `inner` does.
func serving(t *testing.T, inner http.HandlerFunc) *httptest.Server {
	t.Helper()
	made := start(t, nil)
	made.bodyTime = shortTime
	return servedBy(t, made, inner)
}

func servedBy(t *testing.T, made *stackExtension, inner http.HandlerFunc) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(wrapped(t, made, inner))
	t.Cleanup(server.Close)
	return server
}

// wrapped is `inner` as a receiver, behind the extension.
func wrapped(t *testing.T, made *stackExtension, inner http.HandlerFunc) http.Handler {
	t.Helper()
	wrap, err := made.GetHTTPHandler(t.Context())
	require.NoError(t, err)
	handler, err := wrap(t.Context(), inner)
	require.NoError(t, err)
	return handler
}

// begun is a connection on which a request of a long body has begun.
func begun(t *testing.T, server *httptest.Server, path string) net.Conn {
	t.Helper()
	connection, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = connection.Close() })
	_, err = fmt.Fprintf(connection, "POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-protobuf\r\nContent-Length: 1000000000\r\n\r\nbegin", path)
	require.NoError(t, err)
	return connection
}

func TestABodyThatDoesNotComeIsGivenUp(t *testing.T) {
	server := serving(t, func(_ http.ResponseWriter, r *http.Request) { _, _ = io.ReadAll(r.Body) })
	for _, drips := range []bool{false, true} {
		connection := begun(t, server, "/v1/traces")
		if drips {
			go func() {
				for {
					if _, err := connection.Write([]byte("x")); err != nil {
						return
					}
				}
			}()
		}
		response, err := http.ReadResponse(bufio.NewReader(connection), nil)
		require.NoError(t, err)
		said, _ := io.ReadAll(response.Body)
		require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
		require.Contains(t, string(said), "the body did not come within")
		require.NotEmpty(t, response.Header.Get("Retry-After"))
		require.True(t, response.Close)
	}
}

func TestABodyThatIsStillComingTakesRoom(t *testing.T) {
	made := start(t, map[string]any{"max_in_flight_bytes": 1000})
	made.bodyTime = 10 * time.Second
	server := servedBy(t, made, func(http.ResponseWriter, *http.Request) {})
	held := func() int64 {
		made.inFlight.mu.Lock()
		defer made.inFlight.mu.Unlock()
		return made.inFlight.bytes
	}
	stalled, refused := begun(t, server, "/v1/traces"), begun(t, server, "/v1/logs")
	_, err := stalled.Write(make([]byte, 700))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return held() >= 700 }, made.bodyTime, time.Millisecond)
	_, err = refused.Write(make([]byte, 700))
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(refused), nil)
	require.NoError(t, err)
	said, _ := io.ReadAll(response.Body)
	require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
	require.Contains(t, string(said), "AGL_MAX_IN_FLIGHT_BYTES 1000")
	require.Equal(t, "1", response.Header.Get("Retry-After"))
	require.NoError(t, stalled.Close())
	require.Eventually(t, func() bool { return held() == 0 }, made.bodyTime, time.Millisecond)
}

func TestABodyThatNoHandlerReadsHoldsNoConnection(t *testing.T) {
	connection := begun(t, serving(t, func(http.ResponseWriter, *http.Request) {}), "/elsewhere")
	_, err := io.Copy(io.Discard, connection)
	require.NoError(t, err)
}

func TestABodyThatIsThereMayBeWorkedOnForLong(t *testing.T) {
	server := serving(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadAll(r.Body)
		select {
		case <-r.Context().Done(): // the server took its client for gone
			w.WriteHeader(http.StatusTeapot)
		case <-time.After(3 * shortTime):
		}
	})
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/elsewhere", strings.NewReader("all of it"))
	require.NoError(t, err)
	response, err := server.Client().Do(request)
	require.NoError(t, err)
	defer func() { _ = response.Body.Close() }()
	require.Equal(t, http.StatusOK, response.StatusCode)
}

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
	wrap, err := made.GetHTTPHandler(t.Context())
	require.NoError(t, err)
	handler, err := wrap(t.Context(), inner)
	require.NoError(t, err)
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server
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

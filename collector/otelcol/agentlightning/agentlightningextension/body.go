package agentlightningextension

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

// bodyTime limits how long a body may take to arrive, as in the Python collector (BODY_SECONDS): 64 MiB over 5 Mbit/s.
const bodyTime = 120 * time.Second

// lateError is the refusal of a body that did not arrive in time; its client may send it again.
type lateError struct{ within time.Duration }

func (e lateError) Error() string {
	return fmt.Sprintf("the body did not come within %.0f s: send smaller batches", e.within.Seconds())
}

// withinTime sets a deadline for the whole body of a request, so that a client cannot hold it open with a byte now and then. The deadline
// is that of the connection, or of the stream in HTTP/2, so it also ends the server's reading of a body that no handler took. The server
// lifts it at the end of the body.
func withinTime(w http.ResponseWriter, r *http.Request, within time.Duration) {
	if r.Body == nil || r.Body == http.NoBody {
		return
	}
	if server, _ := r.Context().Value(http.ServerContextKey).(*http.Server); server != nil && 0 < server.ReadTimeout && server.ReadTimeout < within {
		return // the receiver's own read_timeout is shorter
	}
	if http.NewResponseController(w).SetReadDeadline(time.Now().Add(within)) != nil {
		return // no connection: a recorder of a test
	}
	r.Body = timedBody{r.Body, within}
}

type timedBody struct {
	io.ReadCloser
	within time.Duration
}

func (t timedBody) Read(into []byte) (int, error) {
	n, err := t.ReadCloser.Read(into)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = lateError{t.within}
	}
	return n, err
}

package agentlightningextension

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

// bodyTime is how long a body may take to come, as of the Python collector's ports (BODY_SECONDS): 64 MiB over 5 Mbit/s.
const bodyTime = 120 * time.Second

// errLate is why a body is given up. Its client may send it again.
type errLate struct{ within time.Duration }

func (e errLate) Error() string {
	return fmt.Sprintf("the body did not come within %.0f s: send smaller batches", e.within.Seconds())
}

// inTime bounds the time in which the body of a request comes, counted from now, so a byte now and then does not help. The deadline is
// the connection's, or the stream's in HTTP/2: it ends also what the server reads on of a body that no handler has taken. The server
// lifts it where a body has come to its end.
func inTime(w http.ResponseWriter, r *http.Request, within time.Duration) {
	if r.Body == nil || r.Body == http.NoBody {
		return
	}
	if server, _ := r.Context().Value(http.ServerContextKey).(*http.Server); server != nil && 0 < server.ReadTimeout && server.ReadTimeout < within {
		return // the receiver's own read_timeout is shorter
	}
	if http.NewResponseController(w).SetReadDeadline(time.Now().Add(within)) != nil {
		return // no connection: a recorder of a test
	}
	r.Body = timely{r.Body, within}
}

type timely struct {
	io.ReadCloser
	within time.Duration
}

func (t timely) Read(into []byte) (int, error) {
	n, err := t.ReadCloser.Read(into)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = errLate{t.within}
	}
	return n, err
}

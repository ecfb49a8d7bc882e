package agentlightningextension

import (
	"context"
	"crypto/sha256"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/collector/client"
	"go.uber.org/zap"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/key"
)

// A sender without a response sends the same bytes again. For ten minutes such a resend gets the outcome of the first request and is not
// stored again, as in collector/resends.py. Of more than maxRemembered requests the oldest are forgotten earlier.
const (
	resendTime    = 10 * time.Minute
	maxRemembered = 250_000
)

var errUnfinished = errors.New("the request came to no end")

// requestKey identifies the resends of a request.
type requestKey [16]byte

// keyOf hashes the transport, the signal, the ids in the metadata, the kind of the sender's key and its attempt, and the bytes: senders
// differ in what they may send.
func keyOf(transport, signal string, body []byte, headers identify.Headers, sender client.Info) requestKey {
	hash := sha256.New()
	for _, text := range []string{transport, signal, headers.RolloutID, headers.AttemptID} {
		hash.Write([]byte(text + "\x00"))
	}
	if key.OfAgent(sender) {
		hash.Write([]byte("agent"))
	}
	if bound := key.BoundTo(sender); bound != nil {
		hash.Write([]byte(bound.Rollout + "/" + bound.Attempt))
	}
	hash.Write([]byte{0})
	hash.Write(body)
	return requestKey(hash.Sum(nil)[:len(requestKey{})])
}

// outcome is the response to a request that the receiver accepted.
type outcome struct {
	rejected int64  // number of refused items
	message  string // why, with counts
}

// received is a request in progress or done.
type received struct {
	key     requestKey
	at      time.Time
	done    chan struct{} // closed when outcome and err are known
	outcome outcome
	err     error
}

// resends remembers the requests of the last minutes.
type resends struct {
	now     func() time.Time
	journal *journal // nil: restarts forget
	logger  *zap.Logger
	failing atomic.Bool

	mu    sync.Mutex
	known map[requestKey]*received
	order []*received // the oldest first
}

// openResends restores the requests in the journal of `folder`; without a folder, restarts forget them.
func openResends(folder string, now func() time.Time, logger *zap.Logger) (*resends, error) {
	r := &resends{now: now, logger: logger, known: map[requestKey]*received{}}
	if folder == "" {
		return r, nil
	}
	journal, before, err := openJournal(folder, now, logger)
	if err != nil {
		return nil, err
	}
	r.journal = journal
	answered := make(chan struct{})
	close(answered)
	for _, one := range before {
		r.add(&received{key: one.key, at: one.at, done: answered, outcome: one.outcome})
	}
	return r, nil
}

func (r *resends) close() {
	if r.journal != nil {
		r.journal.close()
	}
}

// once returns the outcome of `receive` or, for a resend, that of the first request with this key. A disconnected client does not cancel its
// request, since a resend must learn whether it was stored. A failed request is forgotten: sent again it counts as new.
func (r *resends) once(ctx context.Context, key requestKey, receive func(context.Context) (outcome, error)) (outcome, error) {
	r.mu.Lock()
	if before := r.known[key]; before != nil && r.now().Sub(before.at) <= resendTime {
		r.mu.Unlock()
		select {
		case <-before.done:
			return before.outcome, before.err
		case <-ctx.Done():
			return outcome{}, ctx.Err()
		}
	}
	first := &received{key: key, at: r.now(), done: make(chan struct{}), err: errUnfinished}
	r.add(first)
	r.mu.Unlock()
	defer func() {
		if first.err != nil {
			r.mu.Lock()
			r.forget(first)
			r.mu.Unlock()
		}
		close(first.done)
	}()
	first.outcome, first.err = receive(context.WithoutCancel(ctx))
	if first.err == nil && r.journal != nil {
		r.keep(answered{key, first.at, first.outcome})
	}
	return first.outcome, first.err
}

// keep writes a response to the journal; the first of successive failures is logged.
func (r *resends) keep(one answered) {
	err := r.journal.add(one)
	if failed := err != nil; failed != r.failing.Swap(failed) && failed {
		r.logger.Warn("the journal of resends cannot be written: after a restart a resend may be stored again", zap.Error(err))
	}
}

func (r *resends) add(one *received) {
	for len(r.order) > 0 && (len(r.order) >= maxRemembered || one.at.Sub(r.order[0].at) > resendTime) {
		r.forget(r.order[0])
		r.order[0] = nil
		r.order = r.order[1:]
	}
	r.known[one.key] = one
	r.order = append(r.order, one)
}

func (r *resends) forget(one *received) {
	if r.known[one.key] == one {
		delete(r.known, one.key)
	}
}

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

// A sender that got no answer sends the same bytes again. For ten minutes such a resend gets the first one's outcome and is not stored again,
// as in collector/resends.py; of very many requests the oldest are forgotten earlier.
const (
	resendTime    = 10 * time.Minute
	maxRemembered = 250_000
)

var errUnfinished = errors.New("the request came to no end")

// requestKey is what tells a resend.
type requestKey [16]byte

// keyOf hashes the bytes of a request, the ids in its metadata, and whether its sender showed an agent's key and of which attempt: what one
// may not send, another may.
func keyOf(road, signal string, body []byte, headers identify.Headers, sender client.Info) requestKey {
	hash := sha256.New()
	for _, text := range []string{road, signal, headers.RolloutID, headers.AttemptID} {
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

// outcome is the answer to a request that was taken.
type outcome struct {
	rejected int64  // items that were refused
	message  string // why, with counts
}

// taken is a request that is being taken, or was.
type taken struct {
	key     requestKey
	at      time.Time
	done    chan struct{} // closed when outcome and err are known
	outcome outcome
	err     error
}

// resends knows the requests of the last minutes.
type resends struct {
	now     func() time.Time
	journal *journal // nil: restarts forget
	logger  *zap.Logger
	failing atomic.Bool

	mu    sync.Mutex
	known map[requestKey]*taken
	order []*taken // the oldest first
}

// openResends reads what the journal in `folder` tells of the time before; an empty one stands for none.
func openResends(folder string, now func() time.Time, logger *zap.Logger) (*resends, error) {
	r := &resends{now: now, logger: logger, known: map[requestKey]*taken{}}
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
		r.add(&taken{key: one.key, at: one.at, done: answered, outcome: one.outcome})
	}
	return r, nil
}

func (r *resends) close() {
	if r.journal != nil {
		r.journal.close()
	}
}

// once gives the outcome of `take`, or of the request with this key that came before. A client that goes away does not end what it began:
// else a resend could not know whether it was stored. What failed may be sent again as if it were new.
func (r *resends) once(ctx context.Context, key requestKey, take func(context.Context) (outcome, error)) (outcome, error) {
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
	mine := &taken{key: key, at: r.now(), done: make(chan struct{}), err: errUnfinished}
	r.add(mine)
	r.mu.Unlock()
	defer func() {
		if mine.err != nil {
			r.mu.Lock()
			r.forget(mine)
			r.mu.Unlock()
		}
		close(mine.done)
	}()
	mine.outcome, mine.err = take(context.WithoutCancel(ctx))
	if mine.err == nil && r.journal != nil {
		r.keep(answered{key, mine.at, mine.outcome})
	}
	return mine.outcome, mine.err
}

// keep writes an answer into the journal; the first failure of a row is logged.
func (r *resends) keep(one answered) {
	err := r.journal.add(one)
	if failed := err != nil; failed != r.failing.Swap(failed) && failed {
		r.logger.Warn("the journal of resends cannot be written: after a restart a resend may be stored again", zap.Error(err))
	}
}

func (r *resends) add(one *taken) {
	for len(r.order) > 0 && (len(r.order) >= maxRemembered || one.at.Sub(r.order[0].at) > resendTime) {
		r.forget(r.order[0])
		r.order[0] = nil
		r.order = r.order[1:]
	}
	r.known[one.key] = one
	r.order = append(r.order, one)
}

func (r *resends) forget(one *taken) {
	if r.known[one.key] == one {
		delete(r.known, one.key)
	}
}

package queue

import (
	"context"
	"sync"

	"agl-otel.internal/agentlightning/internal/queuepb"
)

// maxTogether bounds one call for numbers.
const maxTogether = 20_000

// Numbers takes sequence numbers. One call is under way at a time; all requests that come meanwhile share the next one.
type Numbers struct {
	take func(context.Context, []*queuepb.SequenceRequest) ([]int64, error)
	ctx  context.Context //nolint:containedctx // of the calls, which serve several requests and outlive each
	stop context.CancelFunc

	mu      sync.Mutex
	waiting []*asked
	running bool
}

type asked struct {
	requests []*queuepb.SequenceRequest
	first    []int64
	err      error
	done     chan struct{}
}

// NewNumbers makes Numbers on top of Client.TakeSequence.
func NewNumbers(take func(context.Context, []*queuepb.SequenceRequest) ([]int64, error)) *Numbers {
	ctx, stop := context.WithCancel(context.Background())
	return &Numbers{take: take, ctx: ctx, stop: stop}
}

// Close ends a call under way; who waits gets its error.
func (n *Numbers) Close() { n.stop() }

// Take answers the first number for each request. Numbers for a caller who has gone are lost: gaps are legal.
func (n *Numbers) Take(ctx context.Context, requests []*queuepb.SequenceRequest) ([]int64, error) {
	if len(requests) == 0 {
		return nil, nil
	}
	mine := &asked{requests: requests, done: make(chan struct{})}
	n.mu.Lock()
	n.waiting = append(n.waiting, mine)
	start := !n.running
	n.running = true
	n.mu.Unlock()
	if start {
		go n.run()
	}
	select {
	case <-mine.done:
		return mine.first, mine.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (n *Numbers) run() {
	for group := n.next(); len(group) > 0; group = n.next() {
		var all []*queuepb.SequenceRequest
		for _, one := range group {
			all = append(all, one.requests...)
		}
		first, err := n.take(n.ctx, all)
		for _, one := range group {
			if one.err = err; err == nil {
				one.first, first = first[:len(one.requests)], first[len(one.requests):]
			}
			close(one.done)
		}
	}
}

func (n *Numbers) next() []*asked {
	n.mu.Lock()
	defer n.mu.Unlock()
	size, count := 0, 0
	for count < len(n.waiting) && (count == 0 || size+len(n.waiting[count].requests) <= maxTogether) {
		size += len(n.waiting[count].requests)
		count++
	}
	group := n.waiting[:count:count]
	n.waiting = n.waiting[count:]
	n.running = count > 0
	return group
}

package queue

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"agl-otel.internal/agentlightning/internal/queuepb"
)

// patience is how long a test waits for what must happen; nothing is measured by it.
const patience = time.Minute

// counting hands out numbers as the queue does, tells that a call has come, and holds it until it is let go.
type counting struct {
	mu      sync.Mutex
	next    map[string]int64
	calls   int
	entered chan struct{}
	gate    chan struct{}
	failed  error
}

func newCounting() *counting {
	return &counting{next: map[string]int64{}, entered: make(chan struct{}, 100), gate: make(chan struct{})}
}

func (c *counting) take(ctx context.Context, requests []*queuepb.SequenceRequest) ([]int64, error) {
	c.entered <- struct{}{}
	select {
	case <-c.gate:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	first := make([]int64, 0, len(requests))
	for _, r := range requests {
		first = append(first, c.next[r.GetRolloutId()]+1)
		c.next[r.GetRolloutId()] += r.GetCount()
	}
	return first, c.failed
}

func want(rolloutID string, count int64) []*queuepb.SequenceRequest {
	return []*queuepb.SequenceRequest{{RolloutId: rolloutID, Count: count}}
}

func TestRequestsThatComeWhileACallIsUnderWayShareTheNextOne(t *testing.T) {
	server := newCounting()
	numbers := NewNumbers(server.take)
	defer numbers.Close()
	taken := make(chan int64, 20)
	var group sync.WaitGroup
	ask := func() {
		first, err := numbers.Take(t.Context(), want("ro", 3))
		if err == nil {
			taken <- first[0]
		}
	}
	group.Go(ask)
	<-server.entered
	for range 19 {
		group.Go(ask)
	}
	require.Eventually(t, func() bool {
		numbers.mu.Lock()
		defer numbers.mu.Unlock()
		return len(numbers.waiting) == 19
	}, patience, time.Millisecond)
	close(server.gate)
	group.Wait()
	close(taken)
	seen := map[int64]bool{}
	for first := range taken {
		require.Equal(t, int64(1), first%3)
		require.False(t, seen[first])
		seen[first] = true
	}
	require.Len(t, seen, 20)
	require.Equal(t, 2, server.calls)
}

func TestAFailedCallFailsAllWhoShareItAndNobodyElse(t *testing.T) {
	server := newCounting()
	server.failed = errors.New("away")
	close(server.gate)
	numbers := NewNumbers(server.take)
	defer numbers.Close()
	_, err := numbers.Take(t.Context(), want("ro", 1))
	require.ErrorContains(t, err, "away")
	server.failed = nil
	first, err := numbers.Take(t.Context(), want("ro", 1))
	require.NoError(t, err)
	require.Len(t, first, 1)
}

func TestACallerWhoLeavesDoesNotHoldUpOthers(t *testing.T) {
	server := newCounting()
	numbers := NewNumbers(server.take)
	defer numbers.Close()
	gone, leave := context.WithCancel(t.Context())
	leave()
	_, err := numbers.Take(gone, want("ro", 1))
	require.ErrorIs(t, err, context.Canceled)
	close(server.gate)
	_, err = numbers.Take(t.Context(), want("ro", 1))
	require.NoError(t, err)
}

func TestClosingEndsACallUnderWay(t *testing.T) {
	server := newCounting()
	numbers := NewNumbers(server.take)
	time.AfterFunc(10*time.Millisecond, numbers.Close)
	_, err := numbers.Take(t.Context(), want("ro", 1))
	require.ErrorIs(t, err, context.Canceled)
}

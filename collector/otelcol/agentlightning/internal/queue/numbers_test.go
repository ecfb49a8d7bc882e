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

// counting hands out numbers as the queue does, and holds every call until it is let go.
type counting struct {
	mu     sync.Mutex
	next   map[string]int64
	calls  int
	gate   chan struct{}
	failed error
}

func (c *counting) take(ctx context.Context, requests []*queuepb.SequenceRequest) ([]int64, error) {
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
	server := &counting{next: map[string]int64{}, gate: make(chan struct{})}
	numbers := NewNumbers(server.take)
	defer numbers.Close()
	taken := make(chan int64, 20)
	var group sync.WaitGroup
	for range 20 {
		group.Go(func() {
			first, err := numbers.Take(t.Context(), want("ro", 3))
			if err == nil {
				taken <- first[0]
			}
		})
	}
	require.Eventually(t, func() bool {
		numbers.mu.Lock()
		defer numbers.mu.Unlock()
		return len(numbers.waiting) >= 1
	}, 5*time.Second, time.Millisecond)
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
	require.Less(t, server.calls, 20)
}

func TestAFailedCallFailsAllWhoShareItAndNobodyElse(t *testing.T) {
	server := &counting{next: map[string]int64{}, gate: make(chan struct{}), failed: errors.New("away")}
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
	server := &counting{next: map[string]int64{}, gate: make(chan struct{})}
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
	server := &counting{next: map[string]int64{}, gate: make(chan struct{})}
	numbers := NewNumbers(server.take)
	time.AfterFunc(10*time.Millisecond, numbers.Close)
	_, err := numbers.Take(t.Context(), want("ro", 1))
	require.ErrorIs(t, err, context.Canceled)
}

package queue

import (
	"context"
	"sync"
	"time"

	"agl-otel.internal/agentlightning/internal/queuepb"
)

const (
	heartbeatInterval = time.Second
	maxBeats          = 100_000 // attempts that wait while the queue is away
)

// Heartbeats tells the queue which attempts were heard of, at most once a second for an attempt, with the time of receipt.
type Heartbeats struct {
	observe func(context.Context, []*queuepb.Observation) error
	failed  func(error)
	cancel  context.CancelFunc // of a call under way
	stop    chan struct{}
	ended   chan struct{}
	wake    chan struct{}

	mu      sync.Mutex
	waiting map[Attempt]*queuepb.Observation
	sentAt  map[Attempt]time.Time
}

// Attempt is an attempt's ids.
type Attempt struct{ RolloutID, AttemptID string }

// NewHeartbeats starts reporting through `observe` (Client.Observe); `failed` hears of every failure. End it with Close.
func NewHeartbeats(observe func(context.Context, []*queuepb.Observation) error, failed func(error)) *Heartbeats {
	ctx, cancel := context.WithCancel(context.Background())
	h := &Heartbeats{
		observe: observe, failed: failed, cancel: cancel,
		stop: make(chan struct{}), ended: make(chan struct{}), wake: make(chan struct{}, 1),
		waiting: map[Attempt]*queuepb.Observation{}, sentAt: map[Attempt]time.Time{},
	}
	go h.run(ctx)
	return h
}

// Add: `spans` of an attempt were received; attempt spans and seals count 0, a heartbeat alone.
func (h *Heartbeats) Add(attempt Attempt, spans int64, receivedAt time.Time) {
	h.mu.Lock()
	h.add(attempt, spans, float64(receivedAt.UnixNano())/1e9)
	h.mu.Unlock()
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// Close lets a call under way end, sends what waits, and ends; all of it within `ctx`.
func (h *Heartbeats) Close(ctx context.Context) {
	close(h.stop)
	select {
	case <-h.ended:
	case <-ctx.Done():
	}
	h.cancel()
	<-h.ended
	h.flush(ctx, true)
}

func (h *Heartbeats) add(attempt Attempt, spans int64, receivedAt float64) {
	if beat, ok := h.waiting[attempt]; ok {
		beat.Spans += spans
		beat.ReceivedAt = max(beat.ReceivedAt, receivedAt)
	} else if len(h.waiting) < maxBeats {
		h.waiting[attempt] = &queuepb.Observation{
			RolloutId: attempt.RolloutID, AttemptId: attempt.AttemptID, Spans: spans, ReceivedAt: receivedAt,
		}
	}
}

func (h *Heartbeats) run(ctx context.Context) {
	defer close(h.ended)
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-h.stop:
			return
		case <-h.wake:
		}
		h.flush(ctx, false)
		wait := heartbeatInterval / 20
		if h.left() { // sent a moment ago, or the queue is away
			wait = heartbeatInterval / 4
			select {
			case h.wake <- struct{}{}:
			default:
			}
		}
		pause.Reset(wait)
		select {
		case <-h.stop:
			return
		case <-pause.C:
		}
	}
}

func (h *Heartbeats) left() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.waiting) > 0
}

func (h *Heartbeats) flush(ctx context.Context, everything bool) {
	due := h.due(time.Now(), everything)
	if len(due) == 0 {
		return
	}
	if err := h.observe(ctx, due); err != nil { // a heartbeat is never worth a span: keep it, go on
		h.failed(err)
		h.mu.Lock()
		defer h.mu.Unlock()
		for _, beat := range due {
			h.add(Attempt{beat.RolloutId, beat.AttemptId}, beat.Spans, beat.ReceivedAt)
		}
	}
}

func (h *Heartbeats) due(now time.Time, everything bool) []*queuepb.Observation {
	h.mu.Lock()
	defer h.mu.Unlock()
	for attempt, at := range h.sentAt {
		if now.Sub(at) >= heartbeatInterval {
			delete(h.sentAt, attempt)
		}
	}
	var due []*queuepb.Observation
	for attempt, beat := range h.waiting {
		if _, lately := h.sentAt[attempt]; everything || !lately {
			due = append(due, beat)
			delete(h.waiting, attempt)
			h.sentAt[attempt] = now
		}
	}
	return due
}

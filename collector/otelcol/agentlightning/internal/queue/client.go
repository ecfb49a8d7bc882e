package queue

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"time"

	"go.opentelemetry.io/collector/component"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"agl-otel.internal/agentlightning/internal/queuepb"
)

const (
	firstPause   = 50 * time.Millisecond
	longestPause = time.Second
	// retryDelay is what a sender is told while the queue is away; a restart of the queue takes about as long.
	retryDelay = time.Second
	// AnnouncementHolds is how long the queue believes an announcement: a killed collector must not stop every reader's barrier.
	AnnouncementHolds = time.Minute
	// maxItems is the most that the queue takes in a list of one message (queue/bounds.py).
	maxItems = 100_000
)

// Client speaks to one queue. Every call may be repeated: each carries a request id, or says the same thing twice.
type Client struct {
	config Config
	conn   *grpc.ClientConn
	stub   queuepb.QueueClient
}

// Dial opens a client; the queue need not be there yet.
func Dial(ctx context.Context, config Config, host component.Host, settings component.TelemetrySettings) (*Client, error) {
	conn, err := config.ToClientConn(ctx, host.GetExtensions(), settings)
	if err != nil {
		return nil, fmt.Errorf("cannot make a client of the queue at %s: %w", config.Endpoint, err)
	}
	return &Client{config: config, conn: conn, stub: queuepb.NewQueueClient(conn)}, nil
}

// Close lets go of the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Endpoint is the queue's address.
func (c *Client) Endpoint() string { return c.config.Endpoint }

// TakeSequence answers the first of `count` new numbers for each request.
func (c *Client) TakeSequence(ctx context.Context, requests []*queuepb.SequenceRequest) ([]int64, error) {
	first := make([]int64, 0, len(requests))
	err := byTheMessage(requests, func(part []*queuepb.SequenceRequest) error {
		numbers, err := c.takeSequence(ctx, part)
		first = append(first, numbers...)
		return err
	})
	return first, err
}

func (c *Client) takeSequence(ctx context.Context, requests []*queuepb.SequenceRequest) ([]int64, error) {
	request := &queuepb.TakeSequenceRequest{Requests: requests, RequestId: newRequestID()}
	var answer *queuepb.TakeSequenceResponse
	err := c.call(ctx, func(ctx context.Context) (err error) {
		answer, err = c.stub.TakeSequence(ctx, request)
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(answer.First) != len(requests) {
		return nil, fmt.Errorf("the queue at %s answered %d requests for numbers with %d", c.Endpoint(), len(requests), len(answer.First))
	}
	return answer.First, nil
}

// Observe reports signs of life. It says when it is sent, each time that it is: by the clock that gave the times of receipt, which may be wrong.
func (c *Client) Observe(ctx context.Context, observations []*queuepb.Observation) error {
	return byTheMessage(observations, func(part []*queuepb.Observation) error {
		return c.call(ctx, func(ctx context.Context) error {
			now := float64(time.Now().UnixNano()) / 1e9
			request := &queuepb.ObserveRequest{Observations: part, SentAt: &now}
			_, err := c.stub.Observe(ctx, request)
			return err
		})
	})
}

// byTheMessage sends items in parts of at most maxItems, in order: one part at least.
func byTheMessage[T any](items []T, send func([]T) error) error {
	for {
		part := items[:min(len(items), maxItems)]
		items = items[len(part):]
		if err := send(part); err != nil || len(items) == 0 {
			return err
		}
	}
}

// Announce says where this collector can be reached, or that it has gone. It holds for AnnouncementHolds.
func (c *Client) Announce(ctx context.Context, instance string, addresses map[string]string, gone bool) error {
	seconds := AnnouncementHolds.Seconds()
	request := &queuepb.AnnounceRequest{
		Service: "collector", Instance: instance, Addresses: addresses, Gone: gone, Seconds: &seconds,
	}
	return c.call(ctx, func(ctx context.Context) error {
		_, err := c.stub.Announce(ctx, request)
		return err
	})
}

// call tries until the timeout while the queue is away.
func (c *Client) call(ctx context.Context, attempt func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, c.config.Timeout)
	defer cancel()
	if c.config.Token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+string(c.config.Token))
	}
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		err := attempt(ctx)
		if err == nil || status.Code(err) != codes.Unavailable {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return err
		case <-timer.C:
		}
	}
}

// Unavailable is what a sender is told when the queue fails: send it again. Whatever the queue's own status is, nothing is dropped. Where
// the queue is, and what it said, is not for senders.
func Unavailable() error {
	failure := status.New(codes.Unavailable, "the queue gives no sequence numbers: send this again later")
	if detailed, detailErr := failure.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(retryDelay)}); detailErr == nil {
		failure = detailed
	}
	return failure.Err()
}

// newRequestID grows with time, so that the queue's index of them stays local.
func newRequestID() string {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails, says its documentation
	return fmt.Sprintf("%012x%s", time.Now().UnixMilli(), hex.EncodeToString(random[:]))
}

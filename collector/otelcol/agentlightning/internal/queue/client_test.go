package queue_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/config/configopaque"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"agl-otel.internal/agentlightning/internal/queue"
	"agl-otel.internal/agentlightning/internal/queuepb"
	"agl-otel.internal/agentlightning/internal/queuetest"
)

func dial(t *testing.T, address, token string, timeout time.Duration) *queue.Client {
	t.Helper()
	config := queue.NewDefaultConfig()
	config.Endpoint, config.Timeout = address, timeout
	config.Token = configopaque.String(token)
	client, err := queue.Dial(t.Context(), config, componenttest.NewNopHost(), componenttest.NewNopTelemetrySettings())
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func TestNumbersComeFromTheRolloutsCounterAboveExplicitOnes(t *testing.T) {
	served := queuetest.Start(t, "")
	client := dial(t, served.Address, "", time.Minute)
	first, err := client.TakeSequence(t.Context(), []*queuepb.SequenceRequest{
		{RolloutId: "ro-a", Count: 3}, {RolloutId: "ro-b", Count: 1}, {RolloutId: "ro-a", Count: 2}, {RolloutId: "ro-a", Count: 1, AtLeast: 40},
	})
	require.NoError(t, err)
	require.Equal(t, []int64{1, 1, 4, 41}, first)
}

func TestWhatIsMoreThanTheQueueTakesInAMessageIsSentInSeveral(t *testing.T) {
	served := queuetest.Start(t, "")
	client := dial(t, served.Address, "", time.Minute)
	const many = 100_001 // one more than the queue takes
	requests := make([]*queuepb.SequenceRequest, many)
	observations := make([]*queuepb.Observation, many)
	for place := range many {
		requests[place] = &queuepb.SequenceRequest{RolloutId: "ro", Count: 1}
		observations[place] = &queuepb.Observation{RolloutId: "ro", AttemptId: "at"}
	}
	first, err := client.TakeSequence(t.Context(), requests)
	require.NoError(t, err)
	require.Len(t, first, many)
	require.Equal(t, []int64{1, many}, []int64{first[0], first[many-1]})
	require.NoError(t, client.Observe(t.Context(), observations))
}

func TestACallWaitsForAQueueThatComesBack(t *testing.T) {
	served := queuetest.Start(t, "")
	client := dial(t, served.Address, "", time.Minute)
	_, err := client.TakeSequence(t.Context(), []*queuepb.SequenceRequest{{RolloutId: "ro", Count: 5}})
	require.NoError(t, err)
	served.Stop()
	answered := make(chan []int64, 1)
	go func() {
		first, _ := client.TakeSequence(context.WithoutCancel(t.Context()), []*queuepb.SequenceRequest{{RolloutId: "ro", Count: 5}})
		answered <- first
	}()
	served.Run()
	require.Equal(t, []int64{6}, <-answered)
}

func TestAQueueThatIsAwayIsUnavailableWithADelayToTryAgain(t *testing.T) {
	client := dial(t, "127.0.0.1:1", "", 200*time.Millisecond)
	_, err := client.TakeSequence(t.Context(), []*queuepb.SequenceRequest{{RolloutId: "ro", Count: 1}})
	require.Error(t, err)
	told := status.Convert(queue.Unavailable())
	require.Equal(t, codes.Unavailable, told.Code())
	require.NotContains(t, told.Message(), "127.0.0.1")
	require.Len(t, told.Details(), 1)
	require.IsType(t, &errdetails.RetryInfo{}, told.Details()[0])
}

func TestTheTokenIsSentAndAWrongOneIsARetryForTheSender(t *testing.T) {
	served := queuetest.Start(t, "secret")
	right := dial(t, served.Address, "secret", time.Minute)
	require.NoError(t, right.Observe(t.Context(), nil))
	wrong := dial(t, served.Address, "guess", time.Minute)
	err := wrong.Observe(t.Context(), nil)
	require.Equal(t, codes.Unauthenticated, status.Code(err))
	require.Equal(t, codes.Unavailable, status.Code(queue.Unavailable()))
}

// listener is a queue that notes what it is told, and is away the first time.
type listener struct {
	queuepb.UnimplementedQueueServer
	told chan *queuepb.ObserveRequest
	away atomic.Bool
}

func (l *listener) Observe(_ context.Context, request *queuepb.ObserveRequest) (*queuepb.ObserveResponse, error) {
	l.told <- request
	if l.away.Swap(false) {
		return nil, status.Error(codes.Unavailable, "away")
	}
	return &queuepb.ObserveResponse{}, nil
}

func TestASignOfLifeSaysWhenItIsSentByTheSendersClock(t *testing.T) {
	heard := &listener{told: make(chan *queuepb.ObserveRequest, 2)}
	heard.away.Store(true)
	socket, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	queuepb.RegisterQueueServer(server, heard)
	go func() { _ = server.Serve(socket) }()
	t.Cleanup(server.Stop)
	client := dial(t, socket.Addr().String(), "", time.Minute)
	before := float64(time.Now().UnixNano()) / 1e9
	require.NoError(t, client.Observe(t.Context(), []*queuepb.Observation{{RolloutId: "ro", AttemptId: "at", ReceivedAt: before}}))
	first, second := <-heard.told, <-heard.told
	require.GreaterOrEqual(t, first.GetSentAt(), before)
	require.Greater(t, second.GetSentAt(), first.GetSentAt(), "a report that is repeated is sent later")
}

func TestSignsOfLifeAreCoalescedAndReachTheQueue(t *testing.T) {
	served := queuetest.Start(t, "")
	client := dial(t, served.Address, "", time.Minute)
	rollout := served.StartRollout(t.Context(), "start-1")
	var calls atomic.Int64
	beats := queue.NewHeartbeats(func(ctx context.Context, seen []*queuepb.Observation) error {
		calls.Add(1)
		return client.Observe(ctx, seen)
	}, func(err error) { t.Error(err) })
	attempt := queue.Attempt{RolloutID: rollout.GetRolloutId(), AttemptID: rollout.GetAttempt().GetAttemptId()}
	beats.Add(attempt, 0, time.Now())
	require.Eventually(t, func() bool { return calls.Load() == 1 }, time.Minute, 5*time.Millisecond)
	require.Equal(t, "preparing", served.Attempt(t.Context(), attempt.RolloutID).GetStatus())
	for range 100 {
		beats.Add(attempt, 1, time.Now())
	}
	beats.Close(t.Context())
	require.Equal(t, "running", served.Attempt(t.Context(), attempt.RolloutID).GetStatus())
	require.LessOrEqual(t, calls.Load(), int64(2))
}

func TestClosingLetsAReportUnderWayEnd(t *testing.T) {
	under, release := make(chan struct{}), make(chan struct{})
	beats := queue.NewHeartbeats(func(ctx context.Context, _ []*queuepb.Observation) error {
		close(under)
		<-release
		return ctx.Err()
	}, func(err error) { t.Error(err) })
	beats.Add(queue.Attempt{RolloutID: "ro", AttemptID: "at"}, 1, time.Now())
	<-under
	closed := make(chan struct{})
	go func() {
		beats.Close(context.Background())
		close(closed)
	}()
	require.Never(t, func() bool {
		select {
		case <-closed:
			return true
		default:
			return false
		}
	}, 100*time.Millisecond, 10*time.Millisecond)
	close(release)
	<-closed
}

func TestSignsOfLifeAreKeptWhileTheQueueIsAway(t *testing.T) {
	var away atomic.Bool
	away.Store(true)
	failures := make(chan error, 100)
	received := make(chan []*queuepb.Observation, 100)
	beats := queue.NewHeartbeats(func(_ context.Context, seen []*queuepb.Observation) error {
		if away.Load() {
			return status.Error(codes.Unavailable, "away")
		}
		received <- seen
		return nil
	}, func(err error) { failures <- err })
	beats.Add(queue.Attempt{RolloutID: "ro", AttemptID: "at"}, 2, time.Unix(1_750_000_000, 0))
	<-failures
	beats.Add(queue.Attempt{RolloutID: "ro", AttemptID: "at"}, 3, time.Unix(1_750_000_001, 0))
	away.Store(false)
	beats.Close(t.Context())
	seen := (<-received)[0]
	require.Equal(t, int64(5), seen.GetSpans())
	require.InDelta(t, 1_750_000_001, seen.GetReceivedAt(), 0.001)
}

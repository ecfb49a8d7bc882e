// Package queuetest starts the real queue for tests: the Python service, on a free port, with a database of its own.
package queuetest

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"agl-otel.internal/agentlightning/internal/queuepb"
)

const (
	startTimeout = 30 * time.Second
	portTries    = 5
)

// Queue is a running service.
type Queue struct {
	Address string
	// Client speaks to it without our own code in between.
	Client queuepb.QueueClient

	t       *testing.T
	port    int
	dir     string
	token   string
	process *exec.Cmd
	exited  chan struct{}
	output  safeBuffer
}

// Start runs a queue until the test ends. The test is skipped where the Python environment (`make setup`) is missing.
func Start(t *testing.T, token string) *Queue {
	t.Helper()
	q := &Queue{t: t, dir: t.TempDir(), token: token}
	t.Cleanup(q.Stop)
	for range portTries { // between the choice of a port and its use another process may take it
		q.port = FreePort(t)
		q.Address = net.JoinHostPort("127.0.0.1", strconv.Itoa(q.port))
		conn, err := grpc.NewClient(q.Address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		q.Client = queuepb.NewQueueClient(conn)
		if q.run() {
			return q
		}
	}
	require.FailNow(t, "the queue did not start", q.output.String())
	return nil
}

// Run starts the service again, after Stop, and returns when it answers.
func (q *Queue) Run() {
	q.t.Helper()
	require.Truef(q.t, q.run(), "the queue did not start again: %s", &q.output)
}

// run says whether the queue of this process, not of another on the same port, came to answer.
func (q *Queue) run() bool {
	q.t.Helper()
	q.process = q.command()
	require.NoError(q.t, q.process.Start())
	process, exited := q.process, make(chan struct{})
	q.exited = exited
	go func() {
		_ = process.Wait()
		close(exited)
	}()
	deadline := time.Now().Add(startTimeout)
	for time.Now().Before(deadline) {
		select {
		case <-exited:
			return false
		case <-time.After(20 * time.Millisecond):
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err := q.Client.Describe(ctx, &queuepb.DescribeRequest{})
		cancel()
		if err == nil || status.Code(err) == codes.Unauthenticated {
			return true
		}
	}
	return false
}

func (q *Queue) command() *exec.Cmd {
	q.t.Helper()
	root := repository(q.t)
	python := os.Getenv("AGL_TEST_PYTHON")
	if python == "" {
		python = filepath.Join(root, ".venv", "bin", "python")
	}
	if _, err := os.Stat(python); err != nil {
		q.t.Skipf("the queue is a Python service and %s is missing: run `make setup`", python)
	}
	command := exec.Command(python, "-m", "agl_otel.queue")
	command.Dir = root
	command.Env = append(os.Environ(), "AGL_HOST=127.0.0.1", "AGL_QUEUE_PORT="+strconv.Itoa(q.port), "AGL_DATA_DIR="+q.dir, "AGL_TOKEN="+q.token)
	command.Stdout, command.Stderr = &q.output, &q.output
	return command
}

// Stop ends the service; it may run again on the same port and data.
func (q *Queue) Stop() {
	if q.process != nil {
		_ = q.process.Process.Signal(syscall.SIGTERM)
		<-q.exited
		q.process = nil
	}
}

// StartRollout makes a rollout with a first attempt, and answers it.
func (q *Queue) StartRollout(ctx context.Context, requestID string) *queuepb.Rollout {
	q.t.Helper()
	worker := "worker-1"
	answer, err := q.Client.Start(ctx, &queuepb.StartRequest{
		Rollouts: []*queuepb.NewRollout{{InputJson: "1"}}, WorkerId: &worker, RequestId: requestID,
	})
	require.NoError(q.t, err)
	require.Len(q.t, answer.GetRollouts(), 1)
	return answer.GetRollouts()[0]
}

// Attempt answers the latest attempt of a rollout.
func (q *Queue) Attempt(ctx context.Context, rolloutID string) *queuepb.Attempt {
	q.t.Helper()
	parts, err := q.Client.StreamAttempts(ctx, &queuepb.QueryAttemptsRequest{RolloutIds: []string{rolloutID}, LatestOnly: true})
	require.NoError(q.t, err)
	answer, err := parts.Recv()
	require.NoError(q.t, err)
	require.Len(q.t, answer.GetAttempts(), 1)
	return answer.GetAttempts()[0]
}

// FreePort is a port that nobody listens on at this moment.
func FreePort(t *testing.T) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = listener.Close() }()
	return listener.Addr().(*net.TCPAddr).Port
}

func repository(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	require.NoError(t, err)
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "pyproject.toml")); err == nil {
			return dir
		}
	}
	t.Skip("this is no checkout of the whole project: there is no queue to start")
	return ""
}

type safeBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *safeBuffer) Write(data []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(data)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

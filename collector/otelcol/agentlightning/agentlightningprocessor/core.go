package agentlightningprocessor

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/processor"
	"go.uber.org/zap"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/queue"
)

// core is what the pipelines of one processor share, because a log record may be told by a trace: the memory, and the queue.
type core struct {
	config    *Config
	logger    *zap.Logger
	telemetry *telemetry
	memory    *identify.Memory
	now       func() time.Time

	client     *queue.Client
	numbers    *queue.Numbers
	heartbeats *queue.Heartbeats
	queueAway  atomic.Bool
}

// cores knows the core of each configuration, and how many pipelines have started it. The service gives all pipelines of a processor
// the same *Config, and a new one after a reload.
type cores struct {
	mu     sync.Mutex
	shared map[*Config]*core
	users  map[*core]int
}

func newCores() *cores { return &cores{shared: map[*Config]*core{}, users: map[*core]int{}} }

// pipeline is the processor in one pipeline.
type pipeline struct {
	*core
	cores   *cores
	set     processor.Settings
	started bool
}

func (c *cores) user(config *Config, set processor.Settings) (*pipeline, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	shared := c.shared[config]
	if shared == nil {
		memory := identify.NewMemory(config.limits())
		counters, err := newTelemetry(set.TelemetrySettings, memory)
		if err != nil {
			return nil, err
		}
		shared = &core{config: config, logger: set.Logger, telemetry: counters, memory: memory, now: time.Now}
		c.shared[config] = shared
	}
	return &pipeline{core: shared, cores: c, set: set}, nil
}

func (p *pipeline) start(ctx context.Context, host component.Host) error {
	p.cores.mu.Lock()
	defer p.cores.mu.Unlock()
	if p.cores.users[p.core] == 0 {
		if err := p.open(ctx, host, p.set.TelemetrySettings); err != nil {
			return err
		}
	}
	p.cores.users[p.core]++
	p.started = true
	return nil
}

func (p *pipeline) shutdown(ctx context.Context) error {
	p.cores.mu.Lock()
	defer p.cores.mu.Unlock()
	if !p.started {
		return nil
	}
	p.started = false
	p.cores.users[p.core]--
	if p.cores.users[p.core] > 0 {
		return nil
	}
	delete(p.cores.users, p.core)
	delete(p.cores.shared, p.config)
	return p.close(ctx)
}

// open does not wait for the queue: a collector may start before it.
func (c *core) open(ctx context.Context, host component.Host, settings component.TelemetrySettings) error {
	client, err := queue.Dial(ctx, c.config.Queue, host, settings)
	if err != nil {
		return err
	}
	c.client = client
	c.numbers = queue.NewNumbers(client.TakeSequence)
	c.heartbeats = queue.NewHeartbeats(client.Observe, func(err error) { c.queueFailed("observe", err) })
	return nil
}

func (c *core) close(ctx context.Context) error {
	c.heartbeats.Close(ctx)
	c.numbers.Close()
	return errors.Join(c.telemetry.close(), c.client.Close())
}

// queueFailed counts every failure, and logs the first of a row.
func (c *core) queueFailed(call string, err error) {
	c.telemetry.queueError(call)
	if !c.queueAway.Swap(true) {
		c.logger.Warn("the queue does not answer: senders of spans are told to try again, signs of life are kept",
			zap.String("queue", c.client.Endpoint()), zap.String("call", call), zap.Error(err))
	}
}

func (c *core) queueAnswered() {
	if c.queueAway.Load() && c.queueAway.Swap(false) {
		c.logger.Info("the queue answers again", zap.String("queue", c.client.Endpoint()))
	}
}

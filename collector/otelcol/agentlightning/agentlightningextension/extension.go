// Package agentlightningextension is the collector's presence in a stack: it tells the queue where this collector is, so that agents
// and readers find it with one address; as a middleware of the receiver it answers GET /health and POST /barrier on the OTLP HTTP port,
// refuses pages of others, unpacks bodies with bounds, sees to it that one bad item does not refuse its request, knows resends, and answers
// with what the processor refused; and it asks senders for the stack's token, as its authenticator (and shows it, as an exporter's).
//
// A barrier answers at once: with `wait_for_result` an acked span is visible. Before a pipeline with a persistent
// queue, where an ack says less, it is turned off.
package agentlightningextension

import (
	"context"
	"sync"
	"time"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/extension"
	"go.uber.org/zap"

	"agl-otel.internal/agentlightning/internal/queue"
)

// Type is the component's name in configurations.
var Type = component.MustNewType("agentlightning")

const (
	announceRetry   = 2 * time.Second
	announceAgain   = queue.AnnouncementHolds / 3
	farewellTimeout = 2 * time.Second
	maxBodyBytes    = 64 << 20
	maxInFlight     = 256 << 20
)

// NewFactory makes the extension's factory.
func NewFactory() extension.Factory {
	return extension.NewFactory(Type,
		func() component.Config {
			return &Config{Queue: queue.NewDefaultConfig(), Barrier: true, MaxBodyBytes: maxBodyBytes, MaxInFlightBytes: maxInFlight}
		},
		func(_ context.Context, set extension.Settings, config component.Config) (extension.Extension, error) {
			given := config.(*Config)
			return &presence{
				config: given, settings: set.TelemetrySettings, started: time.Now(), room: &room{limit: given.MaxInFlightBytes},
				bodyTime: bodyTime,
			}, nil
		},
		component.StabilityLevelAlpha)
}

type presence struct {
	config   *Config
	settings component.TelemetrySettings
	started  time.Time
	room     *room
	bodyTime time.Duration

	resends *resends
	client  *queue.Client
	stop    context.CancelFunc
	ended   sync.WaitGroup
}

// Start does not wait for the queue.
func (p *presence) Start(ctx context.Context, host component.Host) error {
	known, err := openResends(p.config.Resends, time.Now, p.settings.Logger)
	if err != nil {
		return err
	}
	p.resends = known
	addresses := p.config.addresses()
	if len(addresses) == 0 {
		return nil
	}
	client, err := queue.Dial(ctx, p.config.Queue, host, p.settings)
	if err != nil {
		return err
	}
	p.client = client
	announcing, stop := context.WithCancel(context.Background())
	p.stop = stop
	p.ended.Go(func() { p.announce(announcing, addresses) })
	return nil
}

func (p *presence) announce(ctx context.Context, addresses map[string]string) {
	for heard := true; ; {
		pause := announceAgain
		if err := p.client.Announce(ctx, p.instance(), addresses, false); err != nil && ctx.Err() == nil {
			if heard {
				p.settings.Logger.Warn("the queue does not answer: this collector is not announced", zap.Error(err))
			}
			heard, pause = false, announceRetry
		} else {
			heard = true
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// Shutdown takes leave of the queue.
func (p *presence) Shutdown(ctx context.Context) error {
	if p.resends != nil { // it was started
		p.resends.close()
	}
	if p.client == nil {
		return nil
	}
	p.stop()
	p.ended.Wait()
	ctx, cancel := context.WithTimeout(ctx, farewellTimeout)
	defer cancel()
	if err := p.client.Announce(ctx, p.instance(), p.config.addresses(), true); err != nil {
		p.settings.Logger.Debug("the queue was not told that this collector has gone", zap.Error(err))
	}
	return p.client.Close()
}

// instance is kept across restarts.
func (p *presence) instance() string {
	for _, address := range []string{p.config.CollectorHTTP, p.config.CollectorGRPC} {
		if address != "" {
			return address
		}
	}
	return p.config.ClickHouse
}

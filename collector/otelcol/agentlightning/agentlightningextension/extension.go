// Package agentlightningextension joins a collector to a stack. It registers the collector with the queue, so that agents and readers
// find it by one address. As a middleware of the OTLP receiver it answers GET /health and POST /barrier, refuses requests of foreign web
// pages, unpacks bodies within bounds, removes items that would make a request unreadable, recognises resends, reports what the
// processor refused, and counts refused requests. As an authenticator it asks senders for the stack's token; exporters send the token through it.
//
// A barrier answers at once: with `wait_for_result` an acked span is visible. In front of a pipeline with a persistent queue, where an ack
// promises less, it is turned off.
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
			refused, err := newRefused(set.TelemetrySettings)
			return &stackExtension{
				config: given, settings: set.TelemetrySettings, started: time.Now(), inFlight: &inFlight{limit: given.MaxInFlightBytes},
				bodyTime: bodyTime, refused: refused,
			}, err
		},
		component.StabilityLevelAlpha)
}

// stackExtension is the extension; its HTTP middleware is in receive.go, its gRPC middleware in grpc.go, its authenticator in token.go.
type stackExtension struct {
	config   *Config
	settings component.TelemetrySettings
	started  time.Time
	inFlight *inFlight
	bodyTime time.Duration
	refused  *refused

	resends *resends
	client  *queue.Client
	stop    context.CancelFunc
	ended   sync.WaitGroup
}

// Start registers the collector in the background; it does not wait for the queue.
func (e *stackExtension) Start(ctx context.Context, host component.Host) error {
	known, err := openResends(e.config.Resends, time.Now, e.settings.Logger)
	if err != nil {
		return err
	}
	e.resends = known
	addresses := e.config.addresses()
	if len(addresses) == 0 {
		return nil
	}
	client, err := queue.Dial(ctx, e.config.Queue, host, e.settings)
	if err != nil {
		return err
	}
	e.client = client
	announcing, stop := context.WithCancel(context.Background())
	e.stop = stop
	e.ended.Go(func() { e.announce(announcing, addresses) })
	return nil
}

// announce registers the collector and renews the registration until ctx is done.
func (e *stackExtension) announce(ctx context.Context, addresses map[string]string) {
	for heard := true; ; {
		pause := announceAgain
		if err := e.client.Announce(ctx, e.instance(), addresses, false); err != nil && ctx.Err() == nil {
			if heard {
				e.settings.Logger.Warn("the queue does not answer: this collector is not announced", zap.Error(err))
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

// Shutdown deregisters the collector.
func (e *stackExtension) Shutdown(ctx context.Context) error {
	if e.resends != nil { // it was started
		e.resends.close()
	}
	if e.client == nil {
		return nil
	}
	e.stop()
	e.ended.Wait()
	ctx, cancel := context.WithTimeout(ctx, farewellTimeout)
	defer cancel()
	if err := e.client.Announce(ctx, e.instance(), e.config.addresses(), true); err != nil {
		e.settings.Logger.Debug("the queue was not told that this collector has gone", zap.Error(err))
	}
	return e.client.Close()
}

// instance identifies this collector, also after a restart.
func (e *stackExtension) instance() string {
	for _, address := range []string{e.config.CollectorHTTP, e.config.CollectorGRPC} {
		if address != "" {
			return address
		}
	}
	return e.config.ClickHouse
}

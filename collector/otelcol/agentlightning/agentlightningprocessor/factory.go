package agentlightningprocessor

import (
	"context"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/processor"
	"go.opentelemetry.io/collector/processor/processorhelper"
)

// Type is the component's name in configurations.
var Type = component.MustNewType("agentlightning")

const (
	scopeName = "agl-otel.internal/agentlightning/agentlightningprocessor"
	stability = component.StabilityLevelAlpha
)

// NewFactory makes the processor's factory.
func NewFactory() processor.Factory {
	f := &factory{cores: newCores()}
	return processor.NewFactory(Type, createDefaultConfig,
		processor.WithTraces(f.createTraces, stability),
		processor.WithLogs(f.createLogs, stability),
		processor.WithMetrics(f.createMetrics, stability))
}

type factory struct{ cores *cores }

func (f *factory) createTraces(
	ctx context.Context, set processor.Settings, cfg component.Config, next consumer.Traces,
) (processor.Traces, error) {
	p, err := f.cores.user(cfg.(*Config), set)
	if err != nil {
		return nil, err
	}
	next, err = behind{p.core, "traces"}.traces(next)
	if err != nil {
		return nil, err
	}
	return processorhelper.NewTraces(ctx, set, cfg, next, p.processTraces, p.options()...)
}

func (f *factory) createLogs(
	ctx context.Context, set processor.Settings, cfg component.Config, next consumer.Logs,
) (processor.Logs, error) {
	p, err := f.cores.user(cfg.(*Config), set)
	if err != nil {
		return nil, err
	}
	next, err = behind{p.core, "logs"}.logs(next)
	if err != nil {
		return nil, err
	}
	return processorhelper.NewLogs(ctx, set, cfg, next, p.processLogs, p.options()...)
}

func (f *factory) createMetrics(
	ctx context.Context, set processor.Settings, cfg component.Config, next consumer.Metrics,
) (processor.Metrics, error) {
	p, err := f.cores.user(cfg.(*Config), set)
	if err != nil {
		return nil, err
	}
	next, err = behind{p.core, "metrics"}.metrics(next)
	if err != nil {
		return nil, err
	}
	return processorhelper.NewMetrics(ctx, set, cfg, next, p.processMetrics, p.options()...)
}

func (p *pipeline) options() []processorhelper.Option {
	return []processorhelper.Option{
		processorhelper.WithCapabilities(consumer.Capabilities{MutatesData: true}),
		processorhelper.WithStart(p.start),
		processorhelper.WithShutdown(p.shutdown),
	}
}

package agentlightningprocessor

import (
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/collector/component"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/queue"
)

// Policy says what becomes of spans that belong to no rollout.
type Policy string

const (
	// Keep stores them with empty ids.
	Keep Policy = "keep"
	// Drop removes them from the pipeline.
	Drop Policy = "drop"
)

// Config of the processor.
type Config struct {
	// Queue is where numbers come from and signs of life go.
	Queue queue.Config `mapstructure:"queue"`
	// Unidentified is the policy for spans and records that belong to no rollout: keep or drop.
	Unidentified Policy `mapstructure:"unidentified"`
	// MaxTraces, MaxSpans and MaxAge bound what is remembered of traces.
	MaxTraces int           `mapstructure:"max_traces"`
	MaxSpans  int           `mapstructure:"max_spans"`
	MaxAge    time.Duration `mapstructure:"max_age"`
	// MaxItemBytes: a larger span or log record is cut down to its name and times, and marked as invalid.
	MaxItemBytes int `mapstructure:"max_item_bytes"`
	// MaxExpandedBytes: a request whose rows would take more, each with its whole resource and scope, is refused.
	MaxExpandedBytes int `mapstructure:"max_expanded_bytes"`

	_ struct{}
}

func createDefaultConfig() component.Config {
	return &Config{
		Queue:        queue.NewDefaultConfig(),
		Unidentified: Keep,
		MaxTraces:    1_000_000,
		MaxSpans:     1_000_000,
		MaxAge:       time.Hour,
		MaxItemBytes: 32 << 20,

		MaxExpandedBytes: 256 << 20,
	}
}

// Validate says what is wrong, all at once; the queue's part is validated as a part of its own.
func (c *Config) Validate() error {
	var found []error
	switch c.Unidentified {
	case Keep, Drop:
	case "adopt":
		found = append(found, errors.New("`unidentified: adopt` is no policy of the processor: "+
			"adoption belongs to `agl-otel maintain`, which sees whole traces; use keep here"))
	default:
		found = append(found, fmt.Errorf("`unidentified` must be keep or drop, not %q", string(c.Unidentified)))
	}
	for _, bound := range []struct {
		name  string
		value int64
	}{
		{"max_traces", int64(c.MaxTraces)},
		{"max_spans", int64(c.MaxSpans)},
		{"max_age", int64(c.MaxAge)},
		{"max_item_bytes", int64(c.MaxItemBytes)},
		{"max_expanded_bytes", int64(c.MaxExpandedBytes)},
	} {
		if bound.value <= 0 {
			found = append(found, fmt.Errorf("`%s` must be positive", bound.name))
		}
	}
	return errors.Join(found...)
}

func (c *Config) limits() identify.Limits {
	return identify.Limits{MaxTraces: c.MaxTraces, MaxSpans: c.MaxSpans, MaxAge: c.MaxAge}
}

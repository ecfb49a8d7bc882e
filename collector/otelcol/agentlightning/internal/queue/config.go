// Package queue speaks to Agent Lightning's queue: numbers for spans, signs of life of attempts, and where this collector is.
package queue

import (
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/collector/config/configgrpc"
	"go.opentelemetry.io/collector/config/configopaque"
)

const (
	// DefaultEndpoint is where a queue on the same machine listens.
	DefaultEndpoint = "127.0.0.1:4747"
	// DefaultTimeout of a call with its tries is less than the ten seconds after which OTLP exporters give up on a request.
	DefaultTimeout = 3 * time.Second
)

// Config says where the queue is.
type Config struct {
	configgrpc.ClientConfig `mapstructure:",squash"`
	// Token is sent as `authorization: Bearer …`; empty where the queue asks for none.
	Token configopaque.String `mapstructure:"token"`
	// Timeout bounds a call with all its tries.
	Timeout time.Duration `mapstructure:"timeout"`
}

// NewDefaultConfig is a queue on this machine, without TLS, as `agl-otel up` runs it.
func NewDefaultConfig() Config {
	client := configgrpc.NewDefaultClientConfig()
	client.Endpoint = DefaultEndpoint
	client.TLS.Insecure = true
	return Config{ClientConfig: client, Timeout: DefaultTimeout}
}

// Validate says what is wrong.
func (c *Config) Validate() error {
	var found []error
	if c.Endpoint == "" {
		found = append(found, errors.New("`endpoint` is empty: give the host:port of the queue (AGL_STORE)"))
	} else if err := c.ClientConfig.Validate(); err != nil {
		found = append(found, fmt.Errorf("`endpoint` %q is not the host:port of a queue: %w", c.Endpoint, err))
	}
	if c.Timeout <= 0 {
		found = append(found, fmt.Errorf("`timeout` must be positive, not %s", c.Timeout))
	}
	return errors.Join(found...)
}

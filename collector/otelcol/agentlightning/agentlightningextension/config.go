package agentlightningextension

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"

	"go.opentelemetry.io/collector/config/configopaque"

	"agl-otel.internal/agentlightning/internal/queue"
)

// Config of the extension.
type Config struct {
	// Queue is who is told.
	Queue queue.Config `mapstructure:"queue"`
	// CollectorGRPC (host:port), CollectorHTTP and ClickHouse (http://host:port) are this collector as clients reach it. An address that
	// is empty is not announced; without any nothing is.
	CollectorGRPC string `mapstructure:"collector_grpc"`
	CollectorHTTP string `mapstructure:"collector_http"`
	ClickHouse    string `mapstructure:"clickhouse"`
	// Token is what senders must show as `authorization: Bearer …` where a receiver names this extension as its authenticator, and by
	// gRPC also where it is only its middleware; empty: everybody may send.
	Token configopaque.String `mapstructure:"token"`
	// Host is what the receiver listens on. Where it is this machine's own and there is no token, HTTP requests must ask for an address,
	// for localhost, or for one of the names: this, that of CollectorHTTP, and AllowedHosts (with commas; * for all).
	Host         string `mapstructure:"host"`
	AllowedHosts string `mapstructure:"allowed_hosts"`
	// Barrier: answer POST /barrier, at once. Not before a pipeline with a persistent queue.
	Barrier bool `mapstructure:"barrier"`
	// MaxBodyBytes bounds the body of a request over HTTP, as it is unpacked, and a message over gRPC.
	MaxBodyBytes int64 `mapstructure:"max_body_bytes"`
	// MaxInFlightBytes bounds the requests that are being taken, all together, unpacked: one that finds no room is to be sent again.
	MaxInFlightBytes int64 `mapstructure:"max_in_flight_bytes"`
	// Resends is the folder of the journal by which resends are known after a restart; empty: restarts forget.
	Resends string `mapstructure:"resends"`

	_ struct{}
}

// Validate says what is wrong; the queue's part is validated as a part of its own.
func (c *Config) Validate() error {
	var found []error
	for name, address := range map[string]string{"collector_http": c.CollectorHTTP, "clickhouse": c.ClickHouse} {
		if address != "" && !isHTTP(address) {
			found = append(found, fmt.Errorf("`%s` must be http://host:port without a path, not %q", name, address))
		}
	}
	if c.CollectorGRPC != "" && !isHostPort(c.CollectorGRPC) {
		found = append(found, fmt.Errorf("`collector_grpc` must be host:port, not %q", c.CollectorGRPC))
	}
	if c.MaxBodyBytes <= 0 {
		found = append(found, errors.New("`max_body_bytes` must be positive"))
	}
	if c.MaxInFlightBytes <= 0 {
		found = append(found, errors.New("`max_in_flight_bytes` must be positive"))
	}
	return errors.Join(found...)
}

func (c *Config) addresses() map[string]string {
	given := map[string]string{}
	for name, address := range map[string]string{
		"collector_grpc": c.CollectorGRPC, "collector_http": c.CollectorHTTP, "clickhouse": c.ClickHouse,
	} {
		if address != "" {
			given[name] = address
		}
	}
	return given
}

// isHostPort says whether this is host:port, with or without http(s):// in front.
func isHostPort(address string) bool {
	host, port, err := net.SplitHostPort(strings.TrimPrefix(strings.TrimPrefix(address, "https://"), "http://"))
	return err == nil && host != "" && port != ""
}

// isHTTP says whether this is http(s)://host:port without a path.
func isHTTP(address string) bool {
	parsed, err := url.Parse(address)
	return err == nil && (parsed.Scheme == "http" || parsed.Scheme == "https") && parsed.Hostname() != "" && parsed.Port() != "" && parsed.Path == ""
}

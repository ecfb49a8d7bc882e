package agentlightningprocessor

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/confmap"
)

func load(t *testing.T, settings map[string]any) (*Config, error) {
	t.Helper()
	config := createDefaultConfig().(*Config)
	if err := confmap.NewFromStringMap(settings).Unmarshal(config); err != nil {
		return nil, err
	}
	return config, confmap.Validate(config)
}

func TestDefaultsAreValidAndWellFormed(t *testing.T) {
	config, err := load(t, nil)
	require.NoError(t, err)
	require.NoError(t, componenttest.CheckConfigStruct(config))
	require.Equal(t, "127.0.0.1:4747", config.Queue.Endpoint)
	require.True(t, config.Queue.TLS.Insecure)
}

func TestSettingsAreRead(t *testing.T) {
	config, err := load(t, map[string]any{
		"queue":        map[string]any{"endpoint": "queue:4747", "token": "secret", "timeout": "1s"},
		"unidentified": "drop", "max_traces": 10, "max_spans": 20, "max_age": "1m", "max_item_bytes": 1000,
	})
	require.NoError(t, err)
	require.Equal(t, Drop, config.Unidentified)
	require.Equal(t, time.Second, config.Queue.Timeout)
	require.Equal(t, "secret", string(config.Queue.Token))
	require.Equal(t, "[REDACTED]", config.Queue.Token.String())
	require.Equal(t, []int{10, 20}, []int{config.MaxTraces, config.MaxSpans})
}

func TestWrongSettingsAreNamed(t *testing.T) {
	for _, wrong := range []struct {
		settings map[string]any
		says     string
	}{
		{map[string]any{"unidentified": "adopt"}, "adoption belongs to `agl-otel maintain`"},
		{map[string]any{"unidentified": "lose"}, "must be keep or drop, not \"lose\""},
		{map[string]any{"max_traces": 0}, "`max_traces` must be positive"},
		{map[string]any{"max_age": "-1s"}, "`max_age` must be positive"},
		{map[string]any{"max_item_bytes": -1}, "`max_item_bytes` must be positive"},
		{map[string]any{"max_expanded_bytes": 0}, "`max_expanded_bytes` must be positive"},
		{map[string]any{"queue": map[string]any{"endpoint": ""}}, "`endpoint` is empty"},
		{map[string]any{"queue": map[string]any{"endpoint": "queue"}}, "`endpoint` \"queue\" is not the host:port of a queue"},
		{map[string]any{"queue": map[string]any{"timeout": "0s"}}, "`timeout` must be positive"},
		{map[string]any{"unidentifed": "keep"}, "unidentifed"},
	} {
		_, err := load(t, wrong.settings)
		require.ErrorContains(t, err, wrong.says)
	}
}

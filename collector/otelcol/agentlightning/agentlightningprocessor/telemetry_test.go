package agentlightningprocessor

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/processor"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.uber.org/goleak"
	"go.yaml.in/yaml/v3"

	"agl-otel.internal/agentlightning/internal/queuetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type metadata struct {
	Attributes map[string]struct {
		Enum []string `yaml:"enum"`
	} `yaml:"attributes"`
	Telemetry struct {
		Metrics map[string]struct {
			Description string `yaml:"description"`
			Unit        string `yaml:"unit"`
		} `yaml:"metrics"`
	} `yaml:"telemetry"`
}

func described(t *testing.T) metadata {
	t.Helper()
	text, err := os.ReadFile("metadata.yaml")
	require.NoError(t, err)
	var read metadata
	require.NoError(t, yaml.Unmarshal(text, &read))
	return read
}

func TestMetadataDescribesWhatIsCounted(t *testing.T) {
	measured := componenttest.NewTelemetry()
	queue := queuetest.Start(t, "")
	config := createDefaultConfig().(*Config)
	config.Queue.Endpoint = queue.Address
	config.Queue.Timeout = 5 * time.Second
	settings := processor.Settings{ID: component.NewID(Type), TelemetrySettings: measured.NewTelemetrySettings()}
	made, err := NewFactory().CreateTraces(t.Context(), settings, config, consumertest.NewNop())
	require.NoError(t, err)
	require.NoError(t, made.Start(t.Context(), componenttest.NewNopHost()))
	require.NoError(t, made.ConsumeTraces(t.Context(), newRequest(nil, nil, ids("ro/1", ""), map[string]any{"k": "\xff"})))
	require.NoError(t, made.ConsumeTraces(t.Context(), newRequest(ids("ro", "at"), nil)))
	require.NoError(t, made.ConsumeTraces(t.Context(), requestWithRepeatedKeys(t)))
	queue.Stop()
	require.Error(t, made.ConsumeTraces(t.Context(), newRequest(ids("ro", "at"), nil)))

	read := described(t)
	for name, one := range read.Telemetry.Metrics {
		metric, err := measured.GetMetric("otelcol_" + name)
		require.NoError(t, err, name)
		require.Equal(t, one.Description, metric.Description)
		require.Equal(t, one.Unit, metric.Unit)
	}
	require.Len(t, read.Telemetry.Metrics, 8)
	invalid, err := measured.GetMetric(metricInvalid)
	require.NoError(t, err)
	reasons := map[string]int64{}
	for _, point := range invalid.Data.(metricdata.Sum[int64]).DataPoints {
		reason, _ := point.Attributes.Value("reason")
		reasons[reason.AsString()] = point.Value
	}
	require.Equal(t, map[string]int64{"rollout_id": 1, "text": 1, "trace_id": 1}, reasons)
	require.NoError(t, made.Shutdown(t.Context()))
	require.NoError(t, measured.Shutdown(t.Context()))
}

func TestEveryReasonIsDescribed(t *testing.T) {
	enum := described(t).Attributes["reason"].Enum
	for _, code := range reasonCodes {
		require.Contains(t, enum, code)
	}
	require.Contains(t, enum, reasonBefore)
	require.Len(t, enum, len(reasonCodes)+1)
}

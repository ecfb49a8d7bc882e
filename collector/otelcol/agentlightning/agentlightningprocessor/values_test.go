package agentlightningprocessor

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// What the exporter stores is AsString of each value, after the processor has mended it.
func TestGoldenVectorsOfValues(t *testing.T) {
	raw, err := os.ReadFile("../../../conformance/values/values.json")
	require.NoError(t, err)
	var file struct {
		Vectors []struct {
			Name     string          `json:"name"`
			Value    json.RawMessage `json:"value"`
			Text     string          `json:"text"`
			Repeated int64           `json:"repeated"`
		} `json:"vectors"`
	}
	require.NoError(t, json.Unmarshal(raw, &file))
	require.Greater(t, len(file.Vectors), 50)
	for _, vector := range file.Vectors {
		t.Run(vector.Name, func(t *testing.T) {
			attribute := `{"resourceSpans":[{"scopeSpans":[{"spans":[{"attributes":[{"key":"k","value":` + string(vector.Value) + `}]}]}]}]}`
			request, err := (&ptrace.JSONUnmarshaler{}).UnmarshalTraces([]byte(attribute))
			require.NoError(t, err)
			m := new(mender)
			require.Equal(t, []bool{false}, m.traces(request))
			value, ok := request.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(0).Attributes().Get("k")
			require.True(t, ok)
			require.Equal(t, vector.Text, value.AsString())
			require.Equal(t, vector.Repeated, m.keys)
		})
	}
}

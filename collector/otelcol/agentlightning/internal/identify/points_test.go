package identify

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pmetric"
)

// The golden vectors of collector/conformance/metrics: which metrics an agent's key may send, and whose they are.
func TestMetricsOfAgentsAreHeldAgainstTheirKeysAsInTheVectors(t *testing.T) {
	text, err := os.ReadFile("../../../../conformance/metrics/keys.json")
	require.NoError(t, err)
	var read struct {
		Vectors []struct {
			Name    string          `json:"name"`
			Request json.RawMessage `json:"request"`
			Agent   bool            `json:"agent"`
			Bound   *struct {
				Rollout string `json:"rollout"`
				Attempt string `json:"attempt"`
			} `json:"bound"`
			Expect []struct {
				Rollout string `json:"rollout"`
				Attempt string `json:"attempt"`
				Reject  string `json:"reject"`
			} `json:"expect"`
		} `json:"vectors"`
	}
	require.NoError(t, json.Unmarshal(text, &read))
	require.NotEmpty(t, read.Vectors)
	codes := map[string]string{"key": ReasonKey, "training": ReasonTraining, "rollout_id": ReasonRolloutID, "attempt_id": ReasonAttemptID}
	for _, vector := range read.Vectors {
		request, err := (&pmetric.JSONUnmarshaler{}).UnmarshalMetrics(vector.Request)
		require.NoError(t, err, vector.Name)
		refused := map[string]int64{}
		if vector.Agent {
			var bound *IDs
			if vector.Bound != nil {
				bound = &IDs{vector.Bound.Rollout, vector.Bound.Attempt}
			}
			refused = BindPoints(request, bound)
		}
		var stored, wanted []IDs
		late := false
		wantRefused := map[string]int64{}
		for _, each := range vector.Expect {
			switch each.Reject {
			case "timestamp": // which of metrics the Python collector alone looks at
				late = true
			case "":
				wanted = append(wanted, IDs{each.Rollout, each.Attempt})
			default:
				wantRefused[codes[each.Reject]]++
			}
		}
		for _, group := range request.ResourceMetrics().All() {
			found := levelOf(group.Resource().Attributes())
			for _, scope := range group.ScopeMetrics().All() {
				for _, metric := range scope.Metrics().All() {
					for range points(metric) {
						stored = append(stored, IDs{found.rollout, found.attempt})
					}
				}
			}
		}
		if !late {
			require.Equal(t, wantRefused, refused, vector.Name)
			require.Equal(t, wanted, stored, vector.Name)
		}
	}
}

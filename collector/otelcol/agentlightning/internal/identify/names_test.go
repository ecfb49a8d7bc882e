package identify

import (
	"maps"
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// The Python side is the one place where names and reasons are decided.
func TestNamesAndReasonsAreThoseOfThePythonSide(t *testing.T) {
	conventions := pythonConstants(t, "../../../../../hook/agl_otel_hook/conventions.py")
	for name, ours := range map[string]string{
		"ROLLOUT_ID": AttrRolloutID, "ATTEMPT_ID": AttrAttemptID, "SEQUENCE_ID": AttrSequenceID, "INVALID": AttrInvalid,
		"HEADER_ROLLOUT_ID": HeaderRolloutID, "HEADER_ATTEMPT_ID": HeaderAttemptID, "HEADER_ACK": HeaderAck,
		"HEADER_INHERIT": HeaderInherit, "INHERIT_NONE": InheritNone,
		"SPAN_ATTEMPT": SpanAttempt, "SPAN_SEAL": SpanSeal, "REWARD_GIVEN": AttrRewardGiven, "SPAN_LLM": SpanLLM, "TRAIN": Train,
		"FEEDBACK": Feedback,
	} {
		require.Equal(t, conventions[name], ours, name)
	}
	identify := pythonConstants(t, "../../../../identify.py")
	maps.Copy(identify, pythonConstants(t, "../../../../scan.py"))
	for name, ours := range map[string]string{
		"TRACE_ID": ReasonTraceID, "SPAN_ID": ReasonSpanID, "TIMESTAMP": ReasonTimestamp,
		"ROLLOUT_ID": ReasonRolloutID, "ATTEMPT_ID": ReasonAttemptID,
		"PARENT_ID": ReasonParentID, "KEY": ReasonKey, "GIVEN": ReasonGiven,
		"PROXY": ReasonProxy, "STEP": ReasonStep, "FEEDBACK": ReasonFeedback,
	} {
		require.Equal(t, identify[name], ours, name)
	}
	require.Equal(t, identify["TRAINING"], ReasonTraining) // both hold metrics against keys
	require.Equal(t, conventions["TRAINING_FIGURES"], TrainingFigures)
}

func pythonConstants(t *testing.T, path string) map[string]string {
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	found := map[string]string{}
	for _, match := range regexp.MustCompile(`(?m)^([A-Z_]+): Final = "(.*)"$`).FindAllStringSubmatch(string(text), -1) {
		found[match[1]] = match[2]
	}
	return found
}

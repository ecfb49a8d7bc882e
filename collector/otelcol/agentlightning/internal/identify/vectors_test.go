package identify

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

var vectorGlobs = []string{"../../../../conformance/*.json", "../../../../conformance/keys/*.json"}

var reasons = map[string]string{
	"trace_id": ReasonTraceID, "span_id": ReasonSpanID, "timestamp": ReasonTimestamp,
	"rollout_id": ReasonRolloutID, "attempt_id": ReasonAttemptID, "key": ReasonKey,
}

type vectorFile struct {
	NowUnixNano string   `json:"nowUnixNano"`
	Vectors     []vector `json:"vectors"`
}

type vector struct {
	Name  string `json:"name"`
	Pdata *bool  `json:"pdata"`
	Steps []step `json:"steps"`
}

type step struct {
	Request  json.RawMessage   `json:"request"`
	Metadata map[string]string `json:"metadata"`
	Bound    *boundTo          `json:"bound"`
	Expect   []expectation     `json:"expect"`
}

type boundTo struct {
	Rollout string `json:"rollout"`
	Attempt string `json:"attempt"`
}

type expectation struct {
	Rollout  string `json:"rollout"`
	Attempt  string `json:"attempt"`
	Sequence *int64 `json:"sequence"`
	Reject   string `json:"reject"`
}

func (f *vectorFile) UnmarshalJSON(raw []byte) error {
	var file struct {
		NowUnixNano json.RawMessage `json:"nowUnixNano"`
		Vectors     []vector        `json:"vectors"`
	}
	if err := json.Unmarshal(raw, &file); err != nil {
		return err
	}
	now, err := strconv.Unquote(string(file.NowUnixNano))
	if err != nil {
		now = string(file.NowUnixNano)
	}
	f.NowUnixNano, f.Vectors = now, file.Vectors
	return nil
}

func TestGoldenVectors(t *testing.T) {
	var files []string
	for _, glob := range vectorGlobs {
		here, err := filepath.Glob(glob)
		require.NoError(t, err)
		require.NotEmpty(t, here, "the golden vectors are missing")
		files = append(files, here...)
	}
	ran := 0
	for _, file := range files {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		var content vectorFile
		require.NoError(t, json.Unmarshal(raw, &content))
		now, err := strconv.ParseUint(content.NowUnixNano, 10, 64)
		require.NoError(t, err)
		for _, vector := range content.Vectors {
			t.Run(filepath.Base(file)+"/"+vector.Name, func(t *testing.T) {
				if vector.Pdata != nil && !*vector.Pdata {
					t.Skip("the Go data model cannot hold this request")
				}
				memory := NewMemory(Limits{1000, 1000, time.Hour})
				for _, step := range vector.Steps {
					found := runStep(t, step, memory, now)
					require.Equal(t, step.expected(t), comparable(found))
				}
			})
			ran++
		}
	}
	require.Greater(t, ran, 100)
}

func runStep(t *testing.T, s step, memory *Memory, now uint64) []Found {
	headers := Headers{s.Metadata[HeaderRolloutID], s.Metadata[HeaderAttemptID], s.Metadata[HeaderInherit]}
	options := Options{NowUnixNano: now}
	var known Known = memory
	if s.Bound != nil {
		known = nil
	}
	var kind map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(s.Request, &kind))
	if _, logs := kind["resourceLogs"]; logs {
		request, err := (&plog.JSONUnmarshaler{}).UnmarshalLogs(s.Request)
		require.NoError(t, err)
		return s.bind(Logs(request, headers, known, options))
	}
	request, err := (&ptrace.JSONUnmarshaler{}).UnmarshalTraces(s.Request)
	require.NoError(t, err)
	found := s.bind(Spans(request, headers, known, options))
	memory.Learn(found, time.Unix(0, int64(now)))
	return found
}

func (s step) bind(found []Found) []Found {
	if s.Bound != nil {
		Bind(found, IDs{s.Bound.Rollout, s.Bound.Attempt})
	}
	return found
}

type outcome struct {
	IDs
	sequence int64
	explicit bool
	reason   string
}

func comparable(found []Found) []outcome {
	outcomes := make([]outcome, 0, len(found))
	for _, f := range found {
		outcomes = append(outcomes, outcome{f.IDs, f.Sequence, f.Explicit, f.Reason})
	}
	return outcomes
}

func (s step) expected(t *testing.T) []outcome {
	outcomes := make([]outcome, 0, len(s.Expect))
	for _, e := range s.Expect {
		one := outcome{IDs: IDs{e.Rollout, e.Attempt}}
		if e.Sequence != nil {
			one.sequence, one.explicit = *e.Sequence, true
		}
		if e.Reject != "" {
			require.Contains(t, reasons, e.Reject)
			one = outcome{reason: reasons[e.Reject]}
		}
		outcomes = append(outcomes, one)
	}
	return outcomes
}

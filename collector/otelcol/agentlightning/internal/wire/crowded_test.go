package wire

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"agl-otel.internal/agentlightning/internal/refusals"
)

func unbounded(int64) error { return nil }

const mib = 1 << 20

// spans is a request of so many spans of this content.
func spans(count int, content []byte) []byte {
	return of(1, of(2, bytes.Repeat(of(2, content), count)))
}

func TestACrowdedRequestIsRefused(t *testing.T) {
	point := func(kind int, inside []byte) []byte { return of(1, of(2, of(2, of(kind, of(1, inside))))) }
	list := func(values []byte) []byte { return spans(1, of(9, of(1, "k", 2, of(5, values)))) }
	for name, crowded := range map[string]struct {
		signal string
		body   []byte
	}{
		"resources":        {traces, bytes.Repeat([]byte("\n\x00"), mib)},
		"scopes":           {logs, of(1, bytes.Repeat([]byte("\x12\x00"), mib))},
		"cut scopes":       {logs, append([]byte("\n\xff\xff\xff\x7f"), bytes.Repeat([]byte("\x12\x00"), mib)...)},
		"spans":            {traces, spans(mib, nil)},
		"fewer spans":      {traces, spans(10*fewParts, nil)},
		"too many spans":   {traces, spans(maxParts+1, goodSpan)},
		"records":          {logs, spans(mib, nil)},
		"metrics":          {metrics, spans(mib, nil)},
		"attributes":       {traces, spans(1, bytes.Repeat([]byte("\x4a\x00"), mib))},
		"many attributes":  {traces, spans(1, bytes.Repeat([]byte("\x4a\x02\x0a\x00"), maxMessages+1))},
		"events":           {traces, spans(1, bytes.Repeat([]byte("\x5a\x00"), mib))},
		"links":            {traces, spans(1, bytes.Repeat([]byte("\x6a\x00"), mib))},
		"resource's":       {traces, of(1, of(1, bytes.Repeat([]byte("\x0a\x00"), mib)))},
		"entities":         {traces, of(1, of(1, bytes.Repeat([]byte("\x1a\x00"), mib)))},
		"an entity's keys": {traces, of(1, of(1, of(3, bytes.Repeat([]byte("\x1a\x00"), mib))))},
		"points":           {metrics, of(1, of(2, of(2, of(5, bytes.Repeat([]byte("\x0a\x00"), mib)))))},
		"exemplars":        {metrics, point(9, bytes.Repeat([]byte("\x42\x00"), mib))},
		"quantiles":        {metrics, point(11, bytes.Repeat([]byte("\x32\x00"), mib))},
		"buckets":          {metrics, point(10, of(8, of(2, make([]byte, maxValues+1))))},
		"pairs":            {traces, spans(1, of(9, of(1, "k", 2, of(6, bytes.Repeat([]byte("\x0a\x00"), mib)))))},
		"values":           {traces, list(bytes.Repeat([]byte("\x0a\x00"), maxValues+1))},
	} {
		_, err := Clean(crowded.signal, crowded.body, unbounded)
		require.ErrorContains(t, err, "send smaller batches", name)
		require.ErrorAs(t, err, new(refusals.CrowdedError), name)
	}
}

// A row is a row, whatever the kind of its metric.
func TestDataPointsArePartsAsSpansAre(t *testing.T) {
	point := of(1, append(append([]byte("\x11"), make([]byte, 8)...), append([]byte("\x19"), make([]byte, 8)...)...))
	request := func(kind field, count int) []byte {
		return of(1, of(2, of(2, append(of(1, "m"), of(int(kind), bytes.Repeat(point, count))...))))
	}
	for _, kind := range []field{5, 7, 9, 10, 11} {
		_, err := Clean(metrics, request(kind, maxParts-3), unbounded)
		require.NoError(t, err, kind)
		_, err = Clean(metrics, request(kind, maxParts), unbounded)
		require.ErrorContains(t, err, "more than 65536 resources, scopes and items", kind)
	}
	inJSON := func(count int) []byte {
		points := strings.Repeat(`{"asInt":"1"},`, count-1) + `{"asInt":"1"}`
		return []byte(`{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":"m","gauge":{"dataPoints":[` + points + `]}}]}]}]}`)
	}
	_, err := CleanJSON(metrics, inJSON(maxParts-3), unbounded)
	require.NoError(t, err)
	_, err = CleanJSON(metrics, inJSON(maxParts), unbounded)
	require.ErrorContains(t, err, "more than 65536 resources, scopes and items")
}

func TestRoomIsAskedForWhatParsedMessagesTake(t *testing.T) {
	full := errors.New("no room")
	var asked int64
	ask := func(more int64) error {
		asked = more
		return full
	}
	_, err := Clean(traces, spans(1000, goodSpan), ask)
	require.ErrorIs(t, err, full)
	require.Equal(t, int64(1002*messageBytes), asked)
	_, err = CleanJSON(traces, []byte(`{"resourceSpans":[{},{}]}`), ask)
	require.ErrorIs(t, err, full)
	require.Equal(t, int64(3*messageBytes), asked)
}

// The words are those of the Python collector.
func TestTheRefusalOfACrowdedRequestCountsItsParts(t *testing.T) {
	_, err := Clean(traces, spans(10*fewParts, nil), unbounded)
	require.EqualError(t, err, "it has 10242 resources, scopes and items in 20488 bytes; a request with more than 1024 needs 16 bytes for each: "+
		"send smaller batches")
	_, err = Clean(traces, spans(mib, nil), unbounded)
	require.EqualError(t, err, "it has more than 65536 resources, scopes and items in 2097162 bytes: send smaller batches")
	_, err = CleanJSON(traces, []byte(`{"resourceSpans":[`+strings.Repeat("{},", 10*fewParts)+`{}]}`), unbounded)
	require.EqualError(t, err, "it has 10242 objects in 30742 bytes; a request with more than 1024 needs 8 bytes for each: send smaller batches")
}

func TestRealRequestsAreNotCrowded(t *testing.T) {
	token := of(1, "k", 2, of(5, bytes.Repeat([]byte("\x0a\x02\x18\x01"), 2*mib))) // a list of token ids, as long as one may be
	attribute := of(9, of(1, "a", 2, []byte("\x10\x01")))
	for name, body := range map[string][]byte{
		"nothing":         nil,
		"empty spans":     spans(fewParts, nil),
		"many spans":      spans(maxParts-2, goodSpan),
		"token ids":       spans(1, append(bytes.Clone(goodSpan), of(9, token)...)),
		"attributes":      spans(512, append(bytes.Clone(goodSpan), bytes.Repeat(attribute, 1000)...)),
		"another message": bytes.Repeat([]byte("\x12\x00"), mib),
	} {
		_, err := Clean(traces, body, unbounded)
		require.NoError(t, err, name)
	}
}

func TestCrowdedJSONIsRefusedAndDenseRealJSONIsNot(t *testing.T) {
	group := func(items string) []byte {
		return []byte(`{"resourceSpans":[{"scopeSpans":[{"spans":[` + items + `]}]}]}`)
	}
	span := `{"name":"work"},`
	for name, crowded := range map[string][]byte{
		"groups":  []byte(`{"resourceSpans":[` + strings.Repeat("{},", mib) + `{}]}`),
		"spans":   group(strings.Repeat(span, maxParts) + `{}`),
		"objects": []byte(`{"resourceSpans":[],"x":[` + strings.Repeat(`{"a":1},`, maxObjects) + `{}]}`),
	} {
		_, err := CleanJSON(traces, crowded, unbounded)
		require.ErrorContains(t, err, "send smaller batches", name)
		require.ErrorAs(t, err, new(refusals.CrowdedError), name)
	}
	values := strings.Repeat(`{"intValue":"1"},`, 100_000) + `{"intValue":"1"}`
	for name, body := range map[string][]byte{
		"spans":  group(strings.Repeat(span, maxParts-3) + `{}`),
		"values": group(`{"attributes":[{"key":"k","value":{"arrayValue":{"values":[` + values + `]}}}]}`),
	} {
		cleaned, err := CleanJSON(traces, body, unbounded)
		require.NoError(t, err, name)
		require.Equal(t, body, cleaned, name)
	}
}

func TestALargeRequestInJSONIsNotMended(t *testing.T) {
	body := []byte(`{"resourceSpans":[{"scopeSpans":[{"spans":[{"spanId":"zz"}]}],"x":"` + strings.Repeat("x", MaxCleanedJSON) + `"}]}`)
	_, err := CleanJSON(traces, body, unbounded)
	require.ErrorIs(t, err, errTooLargeToClean)
}

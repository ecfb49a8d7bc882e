package agentlightningprocessor

import (
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// Text on the wire must be UTF-8, the receiver does not look, ClickHouse stores any bytes, and then nobody can read the rollout: one bad
// byte in one span fails every query that returns it. So bytes that are no text become U+FFFD here, and the item is refused. Of a key given
// twice the first counts, as everywhere. Lists and maps inside attributes become JSON in the exporter, which has no number for what is not
// finite and would leave the whole text empty: it becomes the text that it has outside of lists. Bytes without any would become null.
const replacement = "\uFFFD"

// mender counts what it had to change.
type mender struct {
	texts, keys int64 // texts that were no UTF-8, and keys given again
}

// traces mends all texts; the result says of each span whether one of its own, its scope's or its resource's was no UTF-8.
func (m *mender) traces(request ptrace.Traces) []bool {
	bad := make([]bool, 0, request.SpanCount())
	for _, group := range request.ResourceSpans().All() {
		before := m.texts
		m.attributes(group.Resource().Attributes())
		inResource := m.texts > before
		for _, scope := range group.ScopeSpans().All() {
			before := m.texts
			m.scope(scope.Scope())
			inScope := inResource || m.texts > before
			for _, span := range scope.Spans().All() {
				before := m.texts
				m.span(span)
				bad = append(bad, inScope || m.texts > before)
			}
		}
	}
	return bad
}

func (m *mender) span(span ptrace.Span) {
	m.text(span.Name(), span.SetName)
	m.text(span.TraceState().AsRaw(), span.TraceState().FromRaw)
	m.text(span.Status().Message(), span.Status().SetMessage)
	m.attributes(span.Attributes())
	for _, event := range span.Events().All() {
		m.text(event.Name(), event.SetName)
		m.attributes(event.Attributes())
	}
	for _, link := range span.Links().All() {
		m.text(link.TraceState().AsRaw(), link.TraceState().FromRaw)
		m.attributes(link.Attributes())
	}
}

// logs is traces for log records.
func (m *mender) logs(request plog.Logs) []bool {
	bad := make([]bool, 0, request.LogRecordCount())
	for _, group := range request.ResourceLogs().All() {
		before := m.texts
		m.text(group.SchemaUrl(), group.SetSchemaUrl)
		m.attributes(group.Resource().Attributes())
		inResource := m.texts > before
		for _, scope := range group.ScopeLogs().All() {
			before := m.texts
			m.text(scope.SchemaUrl(), scope.SetSchemaUrl)
			m.scope(scope.Scope())
			inScope := inResource || m.texts > before
			for _, record := range scope.LogRecords().All() {
				before := m.texts
				m.text(record.SeverityText(), record.SetSeverityText)
				m.text(record.EventName(), record.SetEventName)
				m.value(record.Body())
				m.attributes(record.Attributes())
				bad = append(bad, inScope || m.texts > before)
			}
		}
	}
	return bad
}

func (m *mender) scope(scope pcommon.InstrumentationScope) {
	m.text(scope.Name(), scope.SetName)
	m.text(scope.Version(), scope.SetVersion)
	m.attributes(scope.Attributes())
}

func (m *mender) attributes(attributes pcommon.Map) {
	m.unique(attributes)
	var badKeys []string
	for key, value := range attributes.All() {
		m.value(value)
		if !utf8.ValidString(key) {
			badKeys = append(badKeys, key)
		}
	}
	for _, key := range badKeys {
		m.texts++
		kept := pcommon.NewValueEmpty()
		if value, ok := attributes.Get(key); ok {
			value.CopyTo(kept)
		}
		attributes.Remove(key)
		if mended, taken := attributes.GetOrPutEmpty(strings.ToValidUTF8(key, replacement)); !taken {
			kept.MoveTo(mended)
		}
	}
}

// unique keeps the first of each key.
func (m *mender) unique(attributes pcommon.Map) {
	if !givenTwice(attributes) {
		return
	}
	seen := make(map[string]struct{}, attributes.Len())
	attributes.RemoveIf(func(key string, _ pcommon.Value) bool {
		_, again := seen[key]
		seen[key] = struct{}{}
		if again {
			m.keys++
		}
		return again
	})
}

// givenTwice says whether a key is there more than once; of a few keys without asking for memory, which nearly all maps have.
func givenTwice(attributes pcommon.Map) bool {
	const few = 32
	var keys [few]string
	var many map[string]struct{}
	n := 0
	if attributes.Len() > few {
		many = make(map[string]struct{}, attributes.Len())
	}
	for key := range attributes.All() {
		if many != nil {
			many[key] = struct{}{}
			continue
		}
		if slices.Contains(keys[:n], key) {
			return true
		}
		keys[n] = key
		n++
	}
	return many != nil && len(many) < attributes.Len()
}

func (m *mender) value(value pcommon.Value) {
	switch value.Type() {
	case pcommon.ValueTypeStr:
		m.text(value.Str(), value.SetStr)
	case pcommon.ValueTypeSlice:
		for _, item := range value.Slice().All() {
			m.value(item)
			inJSON(item)
		}
	case pcommon.ValueTypeMap:
		m.attributes(value.Map())
		for _, item := range value.Map().All() {
			inJSON(item)
		}
	default:
	}
}

// inJSON makes texts of what the exporter would lose in a list or a map.
func inJSON(item pcommon.Value) {
	switch item.Type() {
	case pcommon.ValueTypeDouble:
		if math.IsNaN(item.Double()) || math.IsInf(item.Double(), 0) {
			item.SetStr(item.AsString())
		}
	case pcommon.ValueTypeBytes:
		if item.Bytes().Len() == 0 {
			item.SetStr("")
		}
	default:
	}
}

func (m *mender) text(text string, set func(string)) {
	if !utf8.ValidString(text) {
		m.texts++
		set(strings.ToValidUTF8(text, replacement))
	}
}

package agentlightningprocessor

import (
	"strings"
	"unicode/utf8"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// Text on the wire must be UTF-8, the receiver does not look, ClickHouse stores any bytes, and then nobody can read the rollout: one bad
// byte in one span fails every query that returns it. So bytes that are no text become U+FFFD here. Lists and maps inside attributes
// become JSON in the exporter, which does the same.
const replacement = "\uFFFD"

// mender counts what it had to change.
type mender struct{ mended int64 }

func (m *mender) traces(request ptrace.Traces) int64 {
	for _, group := range request.ResourceSpans().All() {
		m.attributes(group.Resource().Attributes())
		for _, scope := range group.ScopeSpans().All() {
			m.scope(scope.Scope())
			for _, span := range scope.Spans().All() {
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
		}
	}
	return m.mended
}

func (m *mender) logs(request plog.Logs) int64 {
	for _, group := range request.ResourceLogs().All() {
		m.text(group.SchemaUrl(), group.SetSchemaUrl)
		m.attributes(group.Resource().Attributes())
		for _, scope := range group.ScopeLogs().All() {
			m.text(scope.SchemaUrl(), scope.SetSchemaUrl)
			m.scope(scope.Scope())
			for _, record := range scope.LogRecords().All() {
				m.text(record.SeverityText(), record.SetSeverityText)
				m.text(record.EventName(), record.SetEventName)
				m.value(record.Body())
				m.attributes(record.Attributes())
			}
		}
	}
	return m.mended
}

func (m *mender) scope(scope pcommon.InstrumentationScope) {
	m.text(scope.Name(), scope.SetName)
	m.text(scope.Version(), scope.SetVersion)
	m.attributes(scope.Attributes())
}

func (m *mender) attributes(attributes pcommon.Map) {
	var badKeys []string
	for key, value := range attributes.All() {
		m.value(value)
		if !utf8.ValidString(key) {
			badKeys = append(badKeys, key)
		}
	}
	for _, key := range badKeys {
		m.mended++
		if value, ok := attributes.Get(key); ok {
			kept := pcommon.NewValueEmpty()
			value.CopyTo(kept)
			attributes.Remove(key)
			kept.MoveTo(attributes.PutEmpty(strings.ToValidUTF8(key, replacement)))
		}
	}
}

func (m *mender) value(value pcommon.Value) {
	if value.Type() == pcommon.ValueTypeStr {
		m.text(value.Str(), value.SetStr)
	}
}

func (m *mender) text(text string, set func(string)) {
	if !utf8.ValidString(text) {
		m.mended++
		set(strings.ToValidUTF8(text, replacement))
	}
}

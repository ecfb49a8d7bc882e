package agentlightningprocessor

import (
	"strings"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/ptrace"

	"agl-otel.internal/agentlightning/internal/identify"
)

// maxCutBytes is what a name or a text of an item that was too large may keep.
const maxCutBytes = 1024

func writeTraces(request ptrace.Traces, found []identify.Found, now time.Time) {
	i := 0
	for _, group := range request.ResourceSpans().All() {
		for _, scope := range group.ScopeSpans().All() {
			for _, span := range scope.Spans().All() {
				f := &found[i]
				i++
				if f.Reason == identify.ReasonSize {
					cutSpan(span)
				}
				if f.Reason != "" {
					mendSpan(span, now)
				}
				// ClickHouse's Duration has no sign: the stock exporter would write an end before its start as 584 years.
				if span.EndTimestamp() < span.StartTimestamp() {
					span.SetEndTimestamp(span.StartTimestamp())
				}
				writeIDs(span.Attributes(), f, f.Rollout != "" || f.Explicit)
			}
		}
	}
}

func writeLogs(request plog.Logs, found []identify.Found, now time.Time) {
	i := 0
	for _, group := range request.ResourceLogs().All() {
		for _, scope := range group.ScopeLogs().All() {
			for _, record := range scope.LogRecords().All() {
				f := &found[i]
				i++
				if f.Reason == identify.ReasonSize {
					record.Body().SetStr("")
					record.Attributes().RemoveIf(func(string, pcommon.Value) bool { return true })
				}
				mendRecord(record, f.Reason, now)
				writeIDs(record.Attributes(), f, f.Explicit)
			}
		}
	}
}

// writeIDs makes the item's own attributes say what was found out, whatever the resource says: the columns' defaults read the item's
// attributes first. Items that nobody named stay as they came.
func writeIDs(attributes pcommon.Map, f *identify.Found, numbered bool) {
	if f.Rollout == "" && f.Reason == "" && !f.Named {
		return
	}
	attributes.RemoveIf(func(key string, _ pcommon.Value) bool {
		return key == identify.AttrRolloutID || key == identify.AttrAttemptID || key == identify.AttrSequenceID || key == identify.AttrInvalid
	})
	attributes.PutStr(identify.AttrRolloutID, f.Rollout)
	attributes.PutStr(identify.AttrAttemptID, f.Attempt)
	if f.Reason != "" {
		attributes.PutStr(identify.AttrInvalid, f.Reason)
	}
	if numbered || f.Numbered || f.Reason != "" {
		attributes.PutInt(identify.AttrSequenceID, f.Sequence)
	}
}

// mendSpan gives a refused span times that ClickHouse holds.
func mendSpan(span ptrace.Span, now time.Time) {
	start := pcommon.NewTimestampFromTime(now)
	if storable(span.StartTimestamp(), now) {
		start = span.StartTimestamp()
	}
	span.SetStartTimestamp(start)
	if !storable(span.EndTimestamp(), now) {
		span.SetEndTimestamp(start)
	}
	for _, event := range span.Events().All() {
		if event.Timestamp() != 0 && !storable(event.Timestamp(), now) {
			event.SetTimestamp(start)
		}
	}
}

// mendRecord: a record without any time gets that of receipt, as in the Python collector.
func mendRecord(record plog.LogRecord, reason string, now time.Time) {
	received := pcommon.NewTimestampFromTime(now)
	if record.Timestamp() == 0 && record.ObservedTimestamp() == 0 {
		record.SetObservedTimestamp(received)
	}
	if reason == "" {
		return
	}
	if record.Timestamp() != 0 && !storable(record.Timestamp(), now) {
		record.SetTimestamp(received)
	}
	if record.ObservedTimestamp() != 0 && !storable(record.ObservedTimestamp(), now) {
		record.SetObservedTimestamp(received)
	}
}

func storable(stamp pcommon.Timestamp, now time.Time) bool {
	return identify.EarliestUnixNano <= uint64(stamp) && uint64(stamp) <= uint64(now.UnixNano())+identify.AheadNano
}

func cutSpan(span ptrace.Span) {
	span.SetName(cut(span.Name()))
	span.Status().SetMessage(cut(span.Status().Message()))
	span.TraceState().FromRaw("")
	span.Attributes().RemoveIf(func(string, pcommon.Value) bool { return true })
	span.Events().RemoveIf(func(ptrace.SpanEvent) bool { return true })
	span.Links().RemoveIf(func(ptrace.SpanLink) bool { return true })
}

func cut(text string) string { return strings.ToValidUTF8(text[:min(len(text), maxCutBytes)], "") }

// dropSpans removes spans and says how many are left.
func dropSpans(request ptrace.Traces, found []identify.Found, dropped func(*identify.Found) bool) int {
	i := 0
	request.ResourceSpans().RemoveIf(func(group ptrace.ResourceSpans) bool {
		group.ScopeSpans().RemoveIf(func(scope ptrace.ScopeSpans) bool {
			scope.Spans().RemoveIf(func(ptrace.Span) bool {
				f := &found[i]
				i++
				return dropped(f)
			})
			return scope.Spans().Len() == 0
		})
		return group.ScopeSpans().Len() == 0
	})
	return request.SpanCount()
}

func dropRecords(request plog.Logs, found []identify.Found, dropped func(*identify.Found) bool) int {
	i := 0
	request.ResourceLogs().RemoveIf(func(group plog.ResourceLogs) bool {
		group.ScopeLogs().RemoveIf(func(scope plog.ScopeLogs) bool {
			scope.LogRecords().RemoveIf(func(plog.LogRecord) bool {
				f := &found[i]
				i++
				return dropped(f)
			})
			return scope.LogRecords().Len() == 0
		})
		return group.ScopeLogs().Len() == 0
	})
	return request.LogRecordCount()
}

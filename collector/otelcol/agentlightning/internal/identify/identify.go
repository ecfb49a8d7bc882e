// Package identify answers: whose span is this? It is pure: (request, request metadata, what is known about traces) gives ids, an
// explicit sequence number, or why the span is refused. The rules are those of collector/identify.py; both must
// pass the golden vectors in collector/conformance. The order of spans within a request does not matter.
package identify

import (
	"strings"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// Found is what identification says of one span or log record.
type Found struct {
	IDs
	// Sequence is the explicit number, where Explicit says that there is one.
	Sequence int64
	Explicit bool
	// Reason says why it is refused; empty on what is taken.
	Reason string
	// Named: the record or its resource has one of our keys, whatever its value; Numbered: the key of the number.
	Named, Numbered bool

	TraceID pcommon.TraceID
	SpanID  pcommon.SpanID
	// Opens: this is the root span of an attempt.
	Opens bool
	// ByKey: its sender has a key that is bound to the attempt.
	ByKey bool
}

// Foreign says whether this is refused because of its sender's key: it was no accident, and nothing of it is kept.
func (f *Found) Foreign() bool {
	switch f.Reason {
	case ReasonKey, ReasonGiven, ReasonProxy, ReasonStep, ReasonFeedback:
		return true
	default:
		return false
	}
}

// Headers are what a request's metadata says: ids, and whether anything is inherited.
type Headers struct{ RolloutID, AttemptID, Inherit string }

// Options of identification.
type Options struct {
	// NowUnixNano is the time of receipt.
	NowUnixNano uint64
	// NoText says of each span or record whether something of it was no UTF-8; nil: nothing was.
	NoText []bool
	// TooLarge says whether a span or record is too large to be kept whole; nil: none is.
	SpanTooLarge   func(ptrace.Span) bool
	RecordTooLarge func(plog.LogRecord) bool
}

func (o Options) noText(index int) bool { return index < len(o.NoText) && o.NoText[index] }

// Spans gives one Found for each span, in the order of the request. Where `known` is nil, or the headers ask for it, nothing is inherited, by
// trace or by parent: of a sender whose key is bound, Bind says whose the rest is, which has the attempt, if any, that is named without a rollout.
func Spans(request ptrace.Traces, headers Headers, known Known, options Options) []Found {
	lowest := checked(level{rollout: headers.RolloutID, attempt: headers.AttemptID})
	found := make([]Found, 0, request.SpanCount())
	pending := make([]bool, 0, cap(found)) // named by no level: rule 2 has the word
	var parents []pcommon.SpanID
	open := false
	for _, group := range request.ResourceSpans().All() {
		resource := levelOf(group.Resource().Attributes())
		for _, scope := range group.ScopeSpans().All() {
			for _, span := range scope.Spans().All() {
				own := levelOf(span.Attributes())
				one, named := explicit(own, resource, lowest, checkSpan(span, options, len(found)))
				one.TraceID, one.SpanID = span.TraceID(), span.SpanID()
				one.Opens = span.Name() == SpanAttempt && span.ParentSpanID().IsEmpty()
				found, pending = append(found, one), append(pending, !named)
				parents = append(parents, span.ParentSpanID())
				open = open || !named
			}
		}
	}
	if open && known != nil && headers.Inherit != InheritNone {
		newInheritance(found, pending, parents, known).run()
	}
	return found
}

// Logs gives one Found for each log record: the same rules, with the record's own span in the parent's place.
func Logs(request plog.Logs, headers Headers, known Known, options Options) []Found {
	lowest := checked(level{rollout: headers.RolloutID, attempt: headers.AttemptID})
	found := make([]Found, 0, request.LogRecordCount())
	for _, group := range request.ResourceLogs().All() {
		resource := levelOf(group.Resource().Attributes())
		for _, scope := range group.ScopeLogs().All() {
			for _, record := range scope.LogRecords().All() {
				own := levelOf(record.Attributes())
				one, named := explicit(own, resource, lowest, checkRecord(record, options, len(found)))
				one.TraceID, one.SpanID = record.TraceID(), record.SpanID()
				if !named && known != nil && headers.Inherit != InheritNone {
					ids, ok := known.OpenedBy(one.TraceID)
					if !ok {
						ids, _ = known.Span(one.TraceID, one.SpanID)
					}
					one.IDs = ids
				}
				found = append(found, one)
			}
		}
	}
	return found
}

// Bind holds what was named (nothing is inherited) against the attempt that the sender's key is bound to: items that name another are
// refused, the rest is the attempt's.
func Bind(found []Found, bound IDs) {
	for i := range found {
		f := &found[i]
		f.ByKey = true
		switch {
		case f.Reason != "":
		case bound.admits(f.IDs):
			f.IDs = bound
		default:
			*f = Found{Reason: ReasonKey, Named: true, Numbered: f.Numbered, TraceID: f.TraceID, SpanID: f.SpanID}
		}
	}
}

// admits says whether ids name nothing else than these.
func (bound IDs) admits(ids IDs) bool {
	return (ids.Rollout == "" || ids.Rollout == bound.Rollout) && (ids.Attempt == "" || ids.Attempt == bound.Attempt)
}

// RefuseForged refuses an agent's spans that say what only services of the stack say; `found` is of the request's spans, in their order.
func RefuseForged(request ptrace.Traces, found []Found) {
	i := 0
	for _, group := range request.ResourceSpans().All() {
		for _, scope := range group.ScopeSpans().All() {
			for _, span := range scope.Spans().All() {
				found[i].refuse(forged(span))
				i++
			}
		}
	}
}

// RefuseForgedRecords does the same for log records.
func RefuseForgedRecords(request plog.Logs, found []Found) {
	i := 0
	for _, group := range request.ResourceLogs().All() {
		for _, scope := range group.ScopeLogs().All() {
			for _, record := range scope.LogRecords().All() {
				for name := range record.Attributes().All() {
					if below(name, Feedback) {
						found[i].refuse(ReasonFeedback)
					}
				}
				i++
			}
		}
	}
}

// refuse sets why an item is refused, unless it is already.
func (f *Found) refuse(reason string) {
	if reason != "" && f.Reason == "" {
		*f = Found{Reason: reason, Named: true, Numbered: f.Numbered, TraceID: f.TraceID, SpanID: f.SpanID}
	}
}

// forged says why a span is refused from an agent, by its name and the keys of its attributes; empty where it is not.
func forged(span ptrace.Span) string {
	reason := ofTheStack(span.Name())
	for name := range span.Attributes().All() {
		if reason != "" {
			break
		}
		reason = ofTheStack(name)
	}
	return reason
}

// ofTheStack says why a name, or one below it, is refused from an agent.
func ofTheStack(name string) string {
	switch {
	case below(name, SpanLLM):
		return ReasonProxy
	case below(name, Train):
		return ReasonStep
	case below(name, AttrRewardGiven):
		return ReasonGiven
	default:
		return ""
	}
}

// below says whether a name is `top`, or begins with it and a dot.
func below(name, top string) bool {
	rest, is := strings.CutPrefix(name, top)
	return is && (rest == "" || rest[0] == '.')
}

// explicit is rule 1; false where no level names a rollout: then the ids have the first attempt that is named without one.
func explicit(own, resource, lowest level, broken string) (Found, bool) {
	found := Found{Reason: broken, Named: own.named || resource.named, Numbered: own.numbered || resource.numbered}
	if broken != "" {
		return found, true
	}
	refused := func(reason string) (Found, bool) {
		return Found{Reason: reason, Named: true, Numbered: found.Numbered}, true
	}
	found.Sequence, found.Explicit = own.sequence, own.explicit
	if !own.explicit {
		found.Sequence, found.Explicit = resource.sequence, resource.explicit
	}
	levels := [...]level{own, resource, lowest}
	for position, l := range levels {
		if l.reason != "" {
			return refused(l.reason)
		}
		if l.rollout == "" {
			continue
		}
		attempt := l.attempt
		for _, lower := range levels[position+1:] {
			if attempt == "" && lower.rollout == l.rollout && lower.attempt != "" {
				if lower.reason != "" {
					return refused(lower.reason)
				}
				attempt = lower.attempt
			}
		}
		found.IDs = IDs{l.rollout, attempt}
		return found, true
	}
	for _, l := range levels {
		if found.Attempt == "" {
			found.Attempt = l.attempt
		}
	}
	return found, false
}

func checkSpan(span ptrace.Span, options Options, index int) string {
	latest := options.NowUnixNano + AheadNano
	if reason := refusedBefore(span.Attributes()); reason != "" {
		return reason
	}
	if options.noText(index) {
		return ReasonText
	}
	if span.TraceID().IsEmpty() {
		return ReasonTraceID
	}
	if span.SpanID().IsEmpty() {
		return ReasonSpanID
	}
	if !between(span.StartTimestamp(), latest) || !between(span.EndTimestamp(), latest) {
		return ReasonTimestamp
	}
	for _, event := range span.Events().All() {
		if uint64(event.Timestamp()) > latest {
			return ReasonTimestamp
		}
	}
	if options.SpanTooLarge != nil && options.SpanTooLarge(span) {
		return ReasonSize
	}
	return ""
}

func checkRecord(record plog.LogRecord, options Options, index int) string {
	if reason := refusedBefore(record.Attributes()); reason != "" {
		return reason
	}
	if options.noText(index) {
		return ReasonText
	}
	stamp := record.Timestamp()
	if stamp == 0 {
		stamp = record.ObservedTimestamp()
	}
	if stamp != 0 && !between(stamp, options.NowUnixNano+AheadNano) {
		return ReasonTimestamp
	}
	if options.RecordTooLarge != nil && options.RecordTooLarge(record) {
		return ReasonSize
	}
	return ""
}

// refusedBefore: another collector on the way has refused it, and has emptied its ids; nothing else may name them now.
func refusedBefore(attributes pcommon.Map) string {
	if value, ok := attributes.Get(AttrInvalid); ok {
		return value.AsString()
	}
	return ""
}

func between(stamp pcommon.Timestamp, latest uint64) bool {
	return EarliestUnixNano <= uint64(stamp) && uint64(stamp) <= latest
}

package agentlightningprocessor

import (
	"context"
	"errors"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"agl-otel.internal/agentlightning/internal/identify"
)

// What the processor counts of itself; metadata.yaml describes each (a test compares the two).
const (
	metricIdentified   = "otelcol_processor_agentlightning_identified"
	metricUnidentified = "otelcol_processor_agentlightning_unidentified"
	metricInvalid      = "otelcol_processor_agentlightning_invalid"
	metricMended       = "otelcol_processor_agentlightning_mended_texts"
	metricRepeated     = "otelcol_processor_agentlightning_repeated_keys"
	metricQueueErrors  = "otelcol_processor_agentlightning_queue_errors"
	metricTraces       = "otelcol_processor_agentlightning_remembered_traces"
	metricSpans        = "otelcol_processor_agentlightning_remembered_spans"
)

// reasonCodes are the values of the `reason` attribute: those of collector/conformance, and size.
var reasonCodes = map[string]string{
	identify.ReasonTraceID:   "trace_id",
	identify.ReasonSpanID:    "span_id",
	identify.ReasonTimestamp: "timestamp",
	identify.ReasonRolloutID: "rollout_id",
	identify.ReasonAttemptID: "attempt_id",
	identify.ReasonParentID:  "parent_id",
	identify.ReasonText:      "text",
	identify.ReasonNesting:   "nesting",
	identify.ReasonKey:       "key",
	identify.ReasonGiven:     "given",
	identify.ReasonTraining:  "training",
	identify.ReasonProxy:     "proxy",
	identify.ReasonStep:      "step",
	identify.ReasonFeedback:  "feedback",
	identify.ReasonSize:      "size",
}

const invalidDescription = "Spans and log records that are refused: kept with empty ids and a reason. " +
	"Spans, log records and data points that the sender's key does not allow are not kept."

// reasonBefore stands for whatever another collector on the way has found.
const reasonBefore = "refused_before"

type telemetry struct {
	identified, unidentified, invalid, mended, repeated, queueErrors metric.Int64Counter
	memory                                                           metric.Registration
}

func newTelemetry(settings component.TelemetrySettings, memory *identify.Memory) (*telemetry, error) {
	meter := settings.MeterProvider.Meter(scopeName)
	var found []error
	counter := func(name, unit, description string) metric.Int64Counter {
		made, err := meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
		found = append(found, err)
		return made
	}
	gauge := func(name, unit, description string) metric.Int64ObservableGauge {
		made, err := meter.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description))
		found = append(found, err)
		return made
	}
	t := &telemetry{
		identified:   counter(metricIdentified, "{item}", "Spans and log records that belong to a rollout."),
		unidentified: counter(metricUnidentified, "{item}", "Spans and log records that belong to no rollout, and what became of them."),
		invalid:      counter(metricInvalid, "{item}", invalidDescription),
		mended:       counter(metricMended, "{text}", "Texts that were no UTF-8: their bad bytes are replaced, or nobody could read them back."),
		repeated:     counter(metricRepeated, "{key}", "Keys given again in one set of attributes: the first counts, the others are dropped."),
		queueErrors:  counter(metricQueueErrors, "{call}", "Calls of the queue that failed, after all tries."),
	}
	traces := gauge(metricTraces, "{trace}", "Traces that are remembered.")
	spans := gauge(metricSpans, "{span}", "Spans that are remembered.")
	if err := errors.Join(found...); err != nil {
		return nil, err
	}
	var err error
	t.memory, err = meter.RegisterCallback(func(_ context.Context, observer metric.Observer) error {
		heldTraces, heldSpans := memory.Sizes()
		observer.ObserveInt64(traces, int64(heldTraces))
		observer.ObserveInt64(spans, int64(heldSpans))
		return nil
	}, traces, spans)
	return t, err
}

func (t *telemetry) close() error { return t.memory.Unregister() }

func (t *telemetry) queueError(call string) {
	t.queueErrors.Add(context.Background(), 1, metric.WithAttributes(attribute.String("call", call)))
}

func (t *telemetry) countMended(signal string, m *mender) {
	if m.texts > 0 {
		t.mended.Add(context.Background(), m.texts, metric.WithAttributes(attribute.String("signal", signal)))
	}
	if m.keys > 0 {
		t.repeated.Add(context.Background(), m.keys, metric.WithAttributes(attribute.String("signal", signal)))
	}
}

func (t *telemetry) count(signal string, policy Policy, found []identify.Found) {
	var identified, unidentified int64
	var refused map[string]int64
	for i := range found {
		switch f := &found[i]; {
		case f.Reason != "":
			if refused == nil {
				refused = map[string]int64{}
			}
			refused[f.Reason]++
		case f.Rollout != "":
			identified++
		default:
			unidentified++
		}
	}
	add := func(counter metric.Int64Counter, number int64, attributes ...attribute.KeyValue) {
		if number > 0 {
			attributes = append(attributes, attribute.String("signal", signal))
			counter.Add(context.Background(), number, metric.WithAttributes(attributes...))
		}
	}
	add(t.identified, identified)
	add(t.unidentified, unidentified, attribute.String("policy", string(policy)))
	for reason, number := range refused {
		t.refuse(signal, reason, number)
	}
}

func (t *telemetry) refuse(signal, reason string, number int64) {
	code, ours := reasonCodes[reason]
	if !ours {
		code = reasonBefore
	}
	t.invalid.Add(context.Background(), number, metric.WithAttributes(attribute.String("reason", code), attribute.String("signal", signal)))
}

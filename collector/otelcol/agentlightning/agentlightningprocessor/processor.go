// Package agentlightningprocessor identifies the rollout and attempt of each span and log record. It adds their ids and a sequence number
// as attributes, from which otel_traces and otel_logs fill their columns by default values. Policy is in internal/identify, the queue's
// client in internal/queue.
package agentlightningprocessor

import (
	"context"

	"go.opentelemetry.io/collector/client"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor/processorhelper"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/key"
	"agl-otel.internal/agentlightning/internal/queue"
	"agl-otel.internal/agentlightning/internal/queuepb"
	"agl-otel.internal/agentlightning/internal/refusals"
)

func (c *core) processTraces(ctx context.Context, request ptrace.Traces) (ptrace.Traces, error) {
	now := c.now()
	sizer := ptrace.ProtoMarshaler{}
	size := sizer.TracesSize(request)
	if err := c.checkTraces(request, size); err != nil {
		return request, refusals.Crowded(ctx, err)
	}
	mended := new(mender)
	options := identify.Options{NowUnixNano: uint64(now.UnixNano()), NoText: mended.traces(request)}
	if size > c.config.MaxItemBytes { // otherwise no span can be too large
		options.SpanTooLarge = func(span ptrace.Span) bool { return sizer.SpanSize(span) > c.config.MaxItemBytes }
	}
	found := identify.Spans(request, headersOf(ctx), c.known(ctx), options)
	bind(ctx, found)
	if key.OfAgent(client.FromContext(ctx)) {
		identify.RefuseForged(request, found)
	}
	c.memory.Learn(found, now)
	for attempt, spans := range heardOf(request, found) {
		c.heartbeats.Add(attempt, spans, now)
	}
	if err := c.number(ctx, found); err != nil {
		return request, err
	}
	c.telemetry.count("traces", c.config.Unidentified, found)
	c.telemetry.countMended("traces", mended)
	writeTraces(request, found, now)
	if c.drops(ctx, found) && dropSpans(request, found, c.dropped) == 0 {
		return request, processorhelper.ErrSkipProcessingData
	}
	return request, nil
}

// processLogs takes no sequence numbers: a rollout numbers its spans only.
func (c *core) processLogs(ctx context.Context, request plog.Logs) (plog.Logs, error) {
	now := c.now()
	sizer := plog.ProtoMarshaler{}
	size := sizer.LogsSize(request)
	if err := c.checkLogs(request, size); err != nil {
		return request, refusals.Crowded(ctx, err)
	}
	mended := new(mender)
	options := identify.Options{NowUnixNano: uint64(now.UnixNano()), NoText: mended.logs(request)}
	if size > c.config.MaxItemBytes {
		options.RecordTooLarge = func(record plog.LogRecord) bool { return sizer.LogRecordSize(record) > c.config.MaxItemBytes }
	}
	found := identify.Logs(request, headersOf(ctx), c.known(ctx), options)
	bind(ctx, found)
	if key.OfAgent(client.FromContext(ctx)) {
		identify.RefuseForgedRecords(request, found)
	}
	c.telemetry.count("logs", c.config.Unidentified, found)
	c.telemetry.countMended("logs", mended)
	writeLogs(request, found, now)
	if c.drops(ctx, found) && dropRecords(request, found, c.dropped) == 0 {
		return request, processorhelper.ErrSkipProcessingData
	}
	return request, nil
}

// processMetrics removes points that the sender's key does not allow. Metrics have no ids but those of their resource, and no numbers.
func (c *core) processMetrics(ctx context.Context, request pmetric.Metrics) (pmetric.Metrics, error) {
	sizer := pmetric.ProtoMarshaler{}
	if err := c.checkMetrics(request, sizer.MetricsSize(request)); err != nil {
		return request, refusals.Crowded(ctx, err)
	}
	info := client.FromContext(ctx)
	if !key.OfAgent(info) {
		return request, nil
	}
	for reason, points := range identify.BindPoints(request, key.BoundTo(info)) {
		c.telemetry.refuse("metrics", reason, points)
		refusals.Add(ctx, reason, points)
	}
	if request.ResourceMetrics().Len() == 0 {
		return request, processorhelper.ErrSkipProcessingData
	}
	return request, nil
}

// drops reports to the sender what its key does not allow, and returns whether any items may have to be dropped.
func (c *core) drops(ctx context.Context, found []identify.Found) bool {
	foreign := false
	for i := range found {
		if f := &found[i]; f.Foreign() {
			refusals.Add(ctx, f.Reason, 1)
			foreign = true
		}
	}
	return foreign || c.config.Unidentified == Drop
}

// dropped returns whether an item is dropped. Refused items are stored, as evidence, except those that the sender's key does not allow.
func (c *core) dropped(f *identify.Found) bool {
	return f.Foreign() || c.config.Unidentified == Drop && f.Rollout == "" && f.Reason == ""
}

// number assigns the next numbers of their rollouts, in order, to identified spans without an explicit number.
func (c *core) number(ctx context.Context, found []identify.Found) error {
	byRollout := map[string]int{}
	var wanted []*queuepb.SequenceRequest
	for i := range found {
		f := &found[i]
		if f.Rollout == "" || f.Reason != "" {
			continue
		}
		index, ok := byRollout[f.Rollout]
		if !ok {
			index = len(wanted)
			byRollout[f.Rollout] = index
			wanted = append(wanted, &queuepb.SequenceRequest{RolloutId: f.Rollout})
		}
		if f.Explicit {
			wanted[index].AtLeast = max(wanted[index].AtLeast, f.Sequence)
		} else {
			wanted[index].Count++
		}
	}
	if len(wanted) == 0 {
		return nil
	}
	next, err := c.numbers.Take(ctx, wanted)
	if err != nil {
		if ctx.Err() != nil { // the sender has disconnected; the queue may be available
			return err
		}
		c.queueFailed("take_sequence", err)
		return queue.Unavailable()
	}
	c.queueAnswered()
	for i := range found {
		f := &found[i]
		if f.Rollout != "" && f.Reason == "" && !f.Explicit {
			index := byRollout[f.Rollout]
			f.Sequence = next[index]
			next[index]++
		}
	}
	return nil
}

// heardOf counts the spans of each attempt. Attempt spans and seals count 0: they are heartbeats, but do not set an attempt to running.
func heardOf(request ptrace.Traces, found []identify.Found) map[queue.Attempt]int64 {
	heard := map[queue.Attempt]int64{}
	i := 0
	for _, group := range request.ResourceSpans().All() {
		for _, scope := range group.ScopeSpans().All() {
			for _, span := range scope.Spans().All() {
				if f := &found[i]; f.Attempt != "" && f.Reason == "" {
					count := int64(1)
					if name := span.Name(); name == identify.SpanAttempt || name == identify.SpanSeal {
						count = 0
					}
					heard[queue.Attempt{RolloutID: f.Rollout, AttemptID: f.Attempt}] += count
				}
				i++
			}
		}
	}
	return heard
}

// known returns the memory from which items may inherit ids; none for a sender whose key is bound to an attempt.
func (c *core) known(ctx context.Context) identify.Known {
	if key.BoundTo(client.FromContext(ctx)) != nil {
		return nil
	}
	return c.memory
}

// bind checks the ids against the attempt to which the sender's key is bound, if it is bound to one.
func bind(ctx context.Context, found []identify.Found) {
	if ids := key.BoundTo(client.FromContext(ctx)); ids != nil {
		identify.Bind(found, *ids)
	}
}

func headersOf(ctx context.Context) identify.Headers {
	metadata := client.FromContext(ctx).Metadata
	first := func(name string) string {
		if values := metadata.Get(name); len(values) > 0 {
			return values[0]
		}
		return ""
	}
	return identify.Headers{
		RolloutID: first(identify.HeaderRolloutID),
		AttemptID: first(identify.HeaderAttemptID),
		Inherit:   first(identify.HeaderInherit),
	}
}

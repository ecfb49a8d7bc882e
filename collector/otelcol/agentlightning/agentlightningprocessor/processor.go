// Package agentlightningprocessor is the collector's part of Agent Lightning: it knows which rollout and attempt each span and log
// record belongs to, and writes that onto it together with a sequence number, as attributes, from which the default values of the
// columns of otel_traces and otel_logs come. Policy is in internal/identify, the queue in internal/queue.
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
		return request, err
	}
	mended := new(mender)
	options := identify.Options{NowUnixNano: uint64(now.UnixNano()), NoText: mended.traces(request)}
	if size > c.config.MaxItemBytes { // else no span of it can be
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

// processLogs needs no numbers: the rollout's counter counts spans only.
func (c *core) processLogs(ctx context.Context, request plog.Logs) (plog.Logs, error) {
	now := c.now()
	sizer := plog.ProtoMarshaler{}
	size := sizer.LogsSize(request)
	if err := c.checkLogs(request, size); err != nil {
		return request, err
	}
	mended := new(mender)
	options := identify.Options{NowUnixNano: uint64(now.UnixNano()), NoText: mended.logs(request)}
	if size > c.config.MaxItemBytes {
		options.RecordTooLarge = func(record plog.LogRecord) bool { return sizer.LogRecordSize(record) > c.config.MaxItemBytes }
	}
	found := identify.Logs(request, headersOf(ctx), c.known(ctx), options)
	bind(ctx, found)
	c.telemetry.count("logs", c.config.Unidentified, found)
	c.telemetry.countMended("logs", mended)
	writeLogs(request, found, now)
	if c.drops(ctx, found) && dropRecords(request, found, c.dropped) == 0 {
		return request, processorhelper.ErrSkipProcessingData
	}
	return request, nil
}

// processMetrics holds metrics against the sender's key. Other ids than their resource's they have none, and no numbers.
func (c *core) processMetrics(ctx context.Context, request pmetric.Metrics) (pmetric.Metrics, error) {
	sizer := pmetric.ProtoMarshaler{}
	if err := c.checkMetrics(request, sizer.MetricsSize(request)); err != nil {
		return request, err
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

// drops says whether there may be something that does not go on; what is refused because of the sender's key is told to the sender.
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

// dropped: refused items stay, as evidence, but not those that their sender's key does not allow.
func (c *core) dropped(f *identify.Found) bool {
	return f.Foreign() || c.config.Unidentified == Drop && f.Rollout == "" && f.Reason == ""
}

// number gives every identified span that has no explicit number the next one of its rollout, in their order.
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
		if ctx.Err() != nil { // the sender has gone; the queue may be well
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

// heardOf counts the spans of each attempt; attempt spans and seals are a heartbeat, but not what makes an attempt running.
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

// known is what a sender's items may inherit from: nothing where its key says whose they are.
func (c *core) known(ctx context.Context) identify.Known {
	if key.BoundTo(client.FromContext(ctx)) != nil {
		return nil
	}
	return c.memory
}

// bind holds what was found against the attempt that the sender's key is bound to, if it is bound to one.
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
	return identify.Headers{RolloutID: first(identify.HeaderRolloutID), AttemptID: first(identify.HeaderAttemptID)}
}

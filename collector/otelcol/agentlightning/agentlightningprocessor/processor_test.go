package agentlightningprocessor

import (
	"context"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/client"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor"
	"go.opentelemetry.io/collector/processor/processortest"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/key"
	"agl-otel.internal/agentlightning/internal/queuetest"
	"agl-otel.internal/agentlightning/internal/refusals"
)

type fixture struct {
	traces  processor.Traces
	logs    processor.Logs
	metrics processor.Metrics
	spans   *consumertest.TracesSink
	lines   *consumertest.LogsSink
	points  *consumertest.MetricsSink
}

func newFixture(t *testing.T, address string, change func(*Config)) *fixture {
	t.Helper()
	config := createDefaultConfig().(*Config)
	config.Queue.Endpoint = address
	if change != nil {
		change(config)
	}
	require.NoError(t, config.Validate())
	factory := NewFactory()
	made := &fixture{spans: new(consumertest.TracesSink), lines: new(consumertest.LogsSink), points: new(consumertest.MetricsSink)}
	var err error
	made.traces, err = factory.CreateTraces(t.Context(), processortest.NewNopSettings(Type), config, made.spans)
	require.NoError(t, err)
	made.logs, err = factory.CreateLogs(t.Context(), processortest.NewNopSettings(Type), config, made.lines)
	require.NoError(t, err)
	made.metrics, err = factory.CreateMetrics(t.Context(), processortest.NewNopSettings(Type), config, made.points)
	require.NoError(t, err)
	require.NoError(t, made.metrics.Start(t.Context(), componenttest.NewNopHost()))
	require.NoError(t, made.traces.Start(t.Context(), componenttest.NewNopHost()))
	require.NoError(t, made.logs.Start(t.Context(), componenttest.NewNopHost()))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		require.NoError(t, made.traces.Shutdown(ctx))
		require.NoError(t, made.logs.Shutdown(ctx))
		require.NoError(t, made.metrics.Shutdown(ctx))
	})
	return made
}

const nowhere = "127.0.0.1:1"

func impatient(config *Config) { config.Queue.Timeout = 100 * time.Millisecond }

func newRequest(resource map[string]any, spans ...map[string]any) ptrace.Traces {
	request := ptrace.NewTraces()
	group := request.ResourceSpans().AppendEmpty()
	_ = group.Resource().Attributes().FromRaw(resource)
	all := group.ScopeSpans().AppendEmpty().Spans()
	for n, attributes := range spans {
		span := all.AppendEmpty()
		span.SetName("work")
		span.SetTraceID(pcommon.TraceID{1, byte(n)})
		span.SetSpanID(pcommon.SpanID{1, byte(n)})
		span.SetStartTimestamp(pcommon.NewTimestampFromTime(time.Now().Add(-time.Second)))
		span.SetEndTimestamp(pcommon.NewTimestampFromTime(time.Now()))
		_ = span.Attributes().FromRaw(attributes)
	}
	return request
}

func spansOf(request ptrace.Traces) []ptrace.Span {
	var all []ptrace.Span
	for _, group := range request.ResourceSpans().All() {
		for _, scope := range group.ScopeSpans().All() {
			for _, span := range scope.Spans().All() {
				all = append(all, span)
			}
		}
	}
	return all
}

func (f *fixture) last(t *testing.T) []ptrace.Span {
	t.Helper()
	all := f.spans.AllTraces()
	require.NotEmpty(t, all)
	return spansOf(all[len(all)-1])
}

func idsOf(attributes pcommon.Map) []any {
	raw := attributes.AsRaw()
	return []any{raw[identify.AttrRolloutID], raw[identify.AttrAttemptID], raw[identify.AttrSequenceID]}
}

func ids(rollout, attempt string) map[string]any {
	return map[string]any{identify.AttrRolloutID: rollout, identify.AttrAttemptID: attempt}
}

func TestSpansGetTheirIdsAndTheNumbersOfTheQueue(t *testing.T) {
	f := newFixture(t, queuetest.Start(t, "").Address, nil)
	ctx := client.NewContext(t.Context(), client.Info{Metadata: client.NewMetadata(map[string][]string{
		identify.HeaderRolloutID: {"ro-h"}, identify.HeaderAttemptID: {"at-h"},
	})})
	require.NoError(t, f.traces.ConsumeTraces(ctx, newRequest(nil, nil, ids("ro-s", "at-s"), map[string]any{identify.AttrSequenceID: 40}, nil)))
	spans := f.last(t)
	require.Equal(t, []any{"ro-h", "at-h", int64(41)}, idsOf(spans[0].Attributes()))
	require.Equal(t, []any{"ro-s", "at-s", int64(1)}, idsOf(spans[1].Attributes()))
	require.Equal(t, []any{"ro-h", "at-h", int64(40)}, idsOf(spans[2].Attributes()))
	require.Equal(t, []any{"ro-h", "at-h", int64(42)}, idsOf(spans[3].Attributes()))
}

func TestTheSpansOwnAttributesSayWhatWasFoundWhateverTheResourceSays(t *testing.T) {
	f := newFixture(t, queuetest.Start(t, "").Address, nil)
	resource := ids("ro-r", "at-r")
	resource[identify.AttrSequenceID] = "7"
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), newRequest(resource, nil, map[string]any{identify.AttrRolloutID: 5})))
	spans := f.last(t)
	require.Equal(t, []any{"ro-r", "at-r", int64(7)}, idsOf(spans[0].Attributes()))
	require.Equal(t, []any{"5", "", int64(7)}, idsOf(spans[1].Attributes()))
}

func TestNumbersOfConcurrentRequestsNeverMeet(t *testing.T) {
	f := newFixture(t, queuetest.Start(t, "").Address, nil)
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 10 {
				if err := f.traces.ConsumeTraces(t.Context(), newRequest(ids("ro", "at"), nil, nil, nil)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	seen := map[any]bool{}
	for _, request := range f.spans.AllTraces() {
		for _, span := range spansOf(request) {
			seen[idsOf(span.Attributes())[2]] = true
		}
	}
	require.Len(t, seen, 240)
	require.True(t, seen[int64(1)])
	require.True(t, seen[int64(240)])
}

func TestWorkMakesAnAttemptRunningButItsRootSpanAndSealsDoNot(t *testing.T) {
	queue := queuetest.Start(t, "")
	f := newFixture(t, queue.Address, nil)
	rollout := queue.StartRollout(t.Context(), "start")
	own := ids(rollout.GetRolloutId(), rollout.GetAttempt().GetAttemptId())
	began := queue.Attempt(t.Context(), rollout.GetRolloutId()).GetLastHeartbeatTime()
	roots := newRequest(own, nil, nil)
	spansOf(roots)[0].SetName(identify.SpanAttempt)
	spansOf(roots)[1].SetName(identify.SpanSeal)
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), roots))
	require.Eventually(t, func() bool {
		return queue.Attempt(t.Context(), rollout.GetRolloutId()).GetLastHeartbeatTime() > began
	}, time.Minute, 10*time.Millisecond)
	require.Equal(t, "preparing", queue.Attempt(t.Context(), rollout.GetRolloutId()).GetStatus())
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), newRequest(own, nil)))
	require.Eventually(t, func() bool {
		return queue.Attempt(t.Context(), rollout.GetRolloutId()).GetStatus() == "running"
	}, time.Minute, 10*time.Millisecond)
}

func TestWhileTheQueueIsAwaySendersAreToldToTryAgain(t *testing.T) {
	queue := queuetest.Start(t, "")
	f := newFixture(t, queue.Address, impatient)
	queue.Stop()
	err := f.traces.ConsumeTraces(t.Context(), newRequest(ids("ro", "at"), nil))
	require.Equal(t, codes.Unavailable, status.Code(err))
	require.Zero(t, f.spans.SpanCount())
	queue.Run()
	require.Eventually(t, func() bool {
		return f.traces.ConsumeTraces(t.Context(), newRequest(ids("ro", "at"), nil)) == nil
	}, time.Minute, 20*time.Millisecond)
	require.Equal(t, 1, f.spans.SpanCount())
	found := idsOf(f.last(t)[0].Attributes())
	require.Equal(t, []any{"ro", "at"}, found[:2])
	require.Positive(t, found[2]) // numbers whose answer was late are lost: gaps are legal
}

func TestSpansOfNoRolloutNeedNoQueueAndStayAsTheyCame(t *testing.T) {
	f := newFixture(t, nowhere, impatient)
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), newRequest(nil, map[string]any{"a": "b"})))
	require.Equal(t, map[string]any{"a": "b"}, f.last(t)[0].Attributes().AsRaw())
}

func TestHalfAnIdentityIsNone(t *testing.T) {
	f := newFixture(t, nowhere, impatient)
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), newRequest(map[string]any{identify.AttrAttemptID: "at"}, nil)))
	require.Equal(t, []any{"", "", nil}, idsOf(f.last(t)[0].Attributes()))
}

func TestRefusedSpansAreKeptWithoutIdsButWithAReason(t *testing.T) {
	f := newFixture(t, nowhere, impatient)
	request := newRequest(ids("ro", "at"), ids("ro/1", "at"), nil, nil)
	spansOf(request)[1].SetTraceID(pcommon.TraceID{})
	spansOf(request)[2].SetStartTimestamp(5)
	spansOf(request)[2].SetEndTimestamp(1 << 63)
	spansOf(request)[2].Events().AppendEmpty().SetTimestamp(1 << 63)
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), request))
	spans := f.last(t)
	for n, reason := range []string{identify.ReasonRolloutID, identify.ReasonTraceID, identify.ReasonTimestamp} {
		require.Equal(t, []any{"", "", int64(0)}, idsOf(spans[n].Attributes()))
		require.Equal(t, reason, spans[n].Attributes().AsRaw()[identify.AttrInvalid])
	}
	now := time.Now()
	require.WithinDuration(t, now, spans[2].StartTimestamp().AsTime(), time.Minute)
	require.Equal(t, spans[2].StartTimestamp(), spans[2].EndTimestamp())
	require.WithinDuration(t, now, spans[2].Events().At(0).Timestamp().AsTime(), time.Minute)
}

func TestWhatACollectorOnTheWayRefusedIsNotIdentifiedByTheNext(t *testing.T) {
	first, second := newFixture(t, nowhere, impatient), newFixture(t, nowhere, impatient)
	require.NoError(t, first.traces.ConsumeTraces(t.Context(), newRequest(ids("ro", "at"), ids("ro/1", "at"))))
	require.NoError(t, second.traces.ConsumeTraces(t.Context(), first.spans.AllTraces()[0]))
	span := second.last(t)[0]
	require.Equal(t, []any{"", "", int64(0)}, idsOf(span.Attributes()))
	require.Equal(t, identify.ReasonRolloutID, span.Attributes().AsRaw()[identify.AttrInvalid])
}

func TestASecondCollectorKeepsTheNumbersOfTheFirst(t *testing.T) {
	queue := queuetest.Start(t, "")
	first, second := newFixture(t, queue.Address, nil), newFixture(t, queue.Address, nil)
	require.NoError(t, first.traces.ConsumeTraces(t.Context(), newRequest(ids("ro", "at"), nil, nil)))
	require.NoError(t, second.traces.ConsumeTraces(t.Context(), first.spans.AllTraces()[0]))
	require.Equal(t, []any{"ro", "at", int64(2)}, idsOf(second.last(t)[1].Attributes()))
}

func TestASpanThatIsTooLargeIsCutDown(t *testing.T) {
	f := newFixture(t, nowhere, func(config *Config) { impatient(config); config.MaxItemBytes = 2000 })
	request := newRequest(ids("ro/1", "at"), map[string]any{"big": string(make([]byte, 5000))}, map[string]any{identify.AttrRolloutID: "ro/2"})
	spansOf(request)[0].SetName(string(make([]byte, 5000)))
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), request))
	spans := f.last(t)
	require.Equal(t, identify.ReasonSize, spans[0].Attributes().AsRaw()[identify.AttrInvalid])
	require.Len(t, spans[0].Name(), maxCutBytes)
	require.Equal(t, identify.ReasonRolloutID, spans[1].Attributes().AsRaw()[identify.AttrInvalid])
}

func TestAnEndBeforeItsStartDoesNotBecomeCenturies(t *testing.T) {
	f := newFixture(t, nowhere, impatient)
	request := newRequest(nil, nil)
	span := spansOf(request)[0]
	span.SetEndTimestamp(span.StartTimestamp() - 1)
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), request))
	require.Equal(t, f.last(t)[0].StartTimestamp(), f.last(t)[0].EndTimestamp())
}

func TestBytesThatAreNoTextAreReplacedWhereverTheyStand(t *testing.T) {
	f := newFixture(t, nowhere, impatient)
	request := newRequest(map[string]any{"r": "\xff"}, map[string]any{"v": "a\xffb", "k\xff": "kept", "good": "\u00e4"})
	span := spansOf(request)[0]
	moment := pcommon.Timestamp(1 << 60) // 2006; of the time of day any byte may be 0xff
	span.SetStartTimestamp(moment)
	span.SetEndTimestamp(moment)
	span.SetName("n\xfe")
	span.Status().SetMessage("\xff")
	span.TraceState().FromRaw("a=\xff")
	event := span.Events().AppendEmpty()
	event.SetName("\xff")
	event.Attributes().PutStr("e", "\xff")
	span.Links().AppendEmpty().Attributes().PutStr("l", "\xff")
	request.ResourceSpans().At(0).ScopeSpans().At(0).Scope().SetName("s\xff")
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), request))
	out := f.last(t)[0]
	attributes := out.Attributes().AsRaw()
	require.Equal(t, identify.ReasonText, attributes[identify.AttrInvalid])
	require.Equal(t, []any{"a\uFFFDb", "kept", "\u00e4"}, []any{attributes["v"], attributes["k\uFFFD"], attributes["good"]})
	raw, err := (&ptrace.ProtoMarshaler{}).MarshalTraces(f.spans.AllTraces()[0])
	require.NoError(t, err)
	require.NotContains(t, string(raw), "\xff")
	require.NotContains(t, string(raw), "n\xfe")

	logs := plog.NewLogs()
	record := logs.ResourceLogs().AppendEmpty().ScopeLogs().AppendEmpty().LogRecords().AppendEmpty()
	record.Body().SetStr("b\xffc")
	require.NoError(t, f.logs.ConsumeLogs(t.Context(), logs))
	require.Equal(t, "b\uFFFDc", f.lines.AllLogs()[0].ResourceLogs().At(0).ScopeLogs().At(0).LogRecords().At(0).Body().Str())
}

// withKey is the context of a request whose sender showed an agent's key.
func withKey(t *testing.T, ids identify.IDs) (context.Context, *refusals.List) {
	t.Helper()
	return refusals.Within(client.NewContext(t.Context(), client.Info{Auth: key.Holder{IDs: ids}}))
}

func TestASenderWithABoundKeyReachesItsAttemptOnly(t *testing.T) {
	f := newFixture(t, queuetest.Start(t, "").Address, nil)
	mine := identify.IDs{Rollout: "ro-1", Attempt: "at-1"}
	ctx, refused := withKey(t, mine)
	require.NoError(t, f.traces.ConsumeTraces(ctx, newRequest(nil, nil, ids("ro-2", "at-1"), ids("ro-1", ""), ids("ro/1", ""))))
	spans := f.last(t)
	require.Len(t, spans, 3, "nothing of what names another attempt is kept")
	require.Equal(t, []any{"ro-1", "at-1", int64(1)}, idsOf(spans[0].Attributes()))
	require.Equal(t, []any{"ro-1", "at-1", int64(2)}, idsOf(spans[1].Attributes()))
	require.Equal(t, identify.ReasonRolloutID, spans[2].Attributes().AsRaw()[identify.AttrInvalid])
	require.Equal(t, []any{int64(1), "1 × " + identify.ReasonKey}, summary(refused))

	ctx, refused = withKey(t, mine)
	given := map[string]any{identify.AttrRewardGiven: true}
	require.NoError(t, f.traces.ConsumeTraces(ctx, newRequest(nil, nil, given, given, ids("ro-2", ""))))
	require.Len(t, f.last(t), 1)
	require.Equal(t, []any{int64(3), "2 × " + identify.ReasonGiven + "; 1 × " + identify.ReasonKey}, summary(refused))
	before := f.spans.SpanCount()
	require.NoError(t, f.traces.ConsumeTraces(ctx, newRequest(nil, ids("ro-2", "at-1"))))
	require.Equal(t, before, f.spans.SpanCount())
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), newRequest(nil, ids("ro-1", "at-1"), given)))
	require.NotContains(t, f.last(t)[1].Attributes().AsRaw(), identify.AttrInvalid)

	logs := plog.NewLogs()
	records := logs.ResourceLogs().AppendEmpty().ScopeLogs().AppendEmpty().LogRecords()
	records.AppendEmpty()
	require.NoError(t, records.AppendEmpty().Attributes().FromRaw(ids("ro-2", "at-2")))
	feedback := map[string]any{identify.Feedback + ".source": "a person", identify.Feedback + ".id": "1"}
	require.NoError(t, records.AppendEmpty().Attributes().FromRaw(feedback))
	ctx, refused = withKey(t, mine)
	require.NoError(t, f.logs.ConsumeLogs(ctx, logs))
	lines := f.lines.AllLogs()[0].ResourceLogs().At(0).ScopeLogs().At(0).LogRecords()
	require.Equal(t, 1, lines.Len())
	require.Equal(t, "at-1", lines.At(0).Attributes().AsRaw()[identify.AttrAttemptID])
	require.Equal(t, []any{int64(2), "1 × " + identify.ReasonKey + "; 1 × " + identify.ReasonFeedback}, summary(refused))
}

func TestWhatOnlyTheStackSaysIsRefusedFromEveryAgentsKey(t *testing.T) {
	f := newFixture(t, queuetest.Start(t, "").Address, nil)
	ours := func() ptrace.Traces {
		request := newRequest(ids("ro-1", "at-1"), map[string]any{identify.SpanLLM + ".call": 1},
			map[string]any{identify.Train + ".run_id": "run"}, map[string]any{identify.AttrRewardGiven: true}, nil, nil, nil)
		spans := request.ResourceSpans().At(0).ScopeSpans().At(0).Spans()
		spans.At(3).SetName(identify.SpanLLM)
		spans.At(4).SetName(identify.Train + ".step")
		spans.At(5).SetName(identify.SpanSeal)
		return request
	}
	for _, of := range []identify.IDs{{Rollout: "ro-1", Attempt: "at-1"}, {}} {
		ctx, refused := withKey(t, of)
		request := ours()
		require.NoError(t, f.traces.ConsumeTraces(ctx, request))
		require.Len(t, f.last(t), 1)
		require.Equal(t, identify.SpanSeal, f.last(t)[0].Name())
		items, why := refused.Summary()
		require.EqualValues(t, 5, items)
		for _, part := range []string{"2 × " + identify.ReasonProxy, "2 × " + identify.ReasonStep, "1 × " + identify.ReasonGiven} {
			require.Contains(t, why, part)
		}
	}
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), ours()))
	require.Len(t, f.last(t), 6, "the stack's token may")
}

func summary(refused *refusals.List) []any {
	items, why := refused.Summary()
	return []any{items, why}
}

// newMetrics has a gauge of two points and, for each name, one of one point, of a resource.
func newMetrics(resource map[string]any, names ...string) pmetric.Metrics {
	request := pmetric.NewMetrics()
	group := request.ResourceMetrics().AppendEmpty()
	_ = group.Resource().Attributes().FromRaw(resource)
	all := group.ScopeMetrics().AppendEmpty().Metrics()
	for n, name := range append([]string{"load"}, names...) {
		metric := all.AppendEmpty()
		metric.SetName(name)
		points := metric.SetEmptyGauge().DataPoints()
		points.AppendEmpty()
		if n == 0 {
			points.AppendEmpty()
		}
	}
	return request
}

func TestAnAgentsKeyBindsMetricsToo(t *testing.T) {
	mine := identify.IDs{Rollout: "ro-1", Attempt: "at-1"}
	training := "agl.training.logprob_drift"
	key, train := identify.ReasonKey, identify.ReasonTraining
	for _, sent := range []struct {
		of       identify.IDs
		resource map[string]any
		stored   []string
		ids      []any
		refused  []any
	}{
		{mine, nil, []string{"load"}, []any{"ro-1", "at-1"}, []any{int64(1), "1 × " + train}},
		{mine, ids("ro-1", "at-1"), []string{"load"}, []any{"ro-1", "at-1"}, []any{int64(1), "1 × " + train}},
		{mine, ids("ro-1", ""), []string{"load"}, []any{"ro-1", "at-1"}, []any{int64(1), "1 × " + train}},
		{mine, ids("", "at-1"), []string{"load"}, []any{"ro-1", "at-1"}, []any{int64(1), "1 × " + train}},
		{mine, ids("", "at-2"), nil, nil, []any{int64(2), "2 × " + key}},
		{mine, ids("ro-2", "at-1"), nil, nil, []any{int64(2), "2 × " + key}},
		{mine, ids("ro-1", "at-2"), nil, nil, []any{int64(2), "2 × " + key}},
		{mine, ids("ro/1", ""), nil, nil, []any{int64(2), "2 × " + identify.ReasonRolloutID}},
		{identify.IDs{}, ids("ro-2", "at-2"), []string{"load"}, []any{"ro-2", "at-2"}, []any{int64(1), "1 × " + train}},
	} {
		f := newFixture(t, nowhere, impatient)
		ctx, refused := withKey(t, sent.of)
		names := []string{training}
		if sent.stored == nil {
			names = nil
		}
		require.NoError(t, f.metrics.ConsumeMetrics(ctx, newMetrics(sent.resource, names...)))
		require.Equal(t, sent.refused, summary(refused))
		if sent.stored == nil {
			require.Empty(t, f.points.AllMetrics())
			continue
		}
		group := f.points.AllMetrics()[0].ResourceMetrics().At(0)
		require.Equal(t, sent.ids, idsOf(group.Resource().Attributes())[:2])
		require.Equal(t, 1, group.ScopeMetrics().At(0).Metrics().Len())
		require.Equal(t, "load", group.ScopeMetrics().At(0).Metrics().At(0).Name())
	}
	f := newFixture(t, nowhere, impatient)
	require.NoError(t, f.metrics.ConsumeMetrics(t.Context(), newMetrics(ids("ro-2", "at-2"), training)))
	require.Equal(t, 2, f.points.AllMetrics()[0].MetricCount(), "who shows the stack's token, or is asked for none, may send all")
}

func TestARolloutNamedTwiceByAResourceIsNamedOnce(t *testing.T) {
	pair := func(value string) []byte {
		inner := append([]byte{0x0a, byte(len(identify.AttrRolloutID))}, identify.AttrRolloutID...)
		inner = append(inner, append([]byte{0x12, byte(len(value) + 2), 0x0a, byte(len(value))}, value...)...)
		return append([]byte{0x0a, byte(len(inner))}, inner...)
	}
	resource := append(pair("ro-1"), pair("ro-2")...)
	raw := append([]byte{0x0a, byte(len(resource))}, resource...)
	metric := []byte{0x12, 0x07, 0x12, 0x05, 0x0a, 0x01, 'm', 0x2a, 0x00} // a gauge without points
	raw = append(raw, metric...)
	request, err := (&pmetric.ProtoUnmarshaler{}).UnmarshalMetrics(append([]byte{0x0a, byte(len(raw))}, raw...))
	require.NoError(t, err)
	f := newFixture(t, nowhere, impatient)
	ctx, _ := withKey(t, identify.IDs{Rollout: "ro-1", Attempt: "at-1"})
	require.NoError(t, f.metrics.ConsumeMetrics(ctx, request))
	out, err := (&pmetric.ProtoMarshaler{}).MarshalMetrics(f.points.AllMetrics()[0])
	require.NoError(t, err)
	require.NotContains(t, string(out), "ro-2")
}

// requestWithRepeatedKeys has one span; it is made of bytes, as pdata's maps cannot be filled twice.
func requestWithRepeatedKeys(t *testing.T) ptrace.Traces {
	t.Helper()
	var raw []byte
	pair := func(number int, name string, value []byte) []byte {
		inner := append(append([]byte{0x0a, byte(len(name))}, name...), append([]byte{0x12, byte(len(value))}, value...)...)
		return append([]byte{byte(number<<3 | 2), byte(len(inner))}, inner...)
	}
	text := func(value string) []byte { return append([]byte{0x0a, byte(len(value))}, value...) }
	kvlist := append(pair(1, "k", text("first")), pair(1, "k", text("second"))...)
	raw = append(raw, pair(9, "a", text("first"))...)
	raw = append(raw, pair(9, "a", text("second"))...)
	raw = append(raw, pair(9, "map", append([]byte{0x32, byte(len(kvlist))}, kvlist...))...)
	raw = append([]byte{0x12, byte(len(raw))}, raw...)
	raw = append([]byte{0x12, byte(len(raw))}, raw...)
	raw = append([]byte{0x0a, byte(len(raw))}, raw...)
	request, err := (&ptrace.ProtoUnmarshaler{}).UnmarshalTraces(raw)
	require.NoError(t, err)
	return request
}

func TestOfAKeyGivenTwiceTheFirstCountsInNestedMapsToo(t *testing.T) {
	request := requestWithRepeatedKeys(t)
	m := new(mender)
	m.traces(request)
	require.Equal(t, int64(2), m.keys)
	attributes := spansOf(request)[0].Attributes()
	require.Equal(t, 2, attributes.Len())
	require.Equal(t, map[string]any{"a": "first", "map": map[string]any{"k": "first"}}, attributes.AsRaw())
}

func TestNumbersThatJSONHasNotAreTextsInListsAndMaps(t *testing.T) {
	request := newRequest(nil, map[string]any{
		"list": []any{math.NaN(), math.Inf(1), math.Inf(-1), math.Copysign(0, -1), 1.5, 1e21, int64(1<<53 + 1), []byte{0xff}},
		"map":  map[string]any{"in": []any{map[string]any{"deep": math.NaN()}}}, "alone": math.NaN(),
	})
	new(mender).traces(request)
	attributes := spansOf(request)[0].Attributes()
	for name, wanted := range map[string]string{
		"list": `["NaN","Infinity","-Infinity",-0,1.5,1e+21,9007199254740993,"/w=="]`, "map": `{"in":[{"deep":"NaN"}]}`, "alone": "NaN",
	} {
		value, _ := attributes.Get(name)
		require.Equal(t, wanted, value.AsString())
	}
}

func TestDropRemovesWhatBelongsToNoRolloutButNotWhatIsRefused(t *testing.T) {
	f := newFixture(t, nowhere, func(config *Config) { impatient(config); config.Unidentified = Drop })
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), newRequest(nil, nil, ids("ro/1", ""), nil)))
	require.Len(t, f.last(t), 1)
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), newRequest(nil, nil)))
	require.Len(t, f.spans.AllTraces(), 1)
}

func TestLogRecordsAreToldByTheTraceThatTheTracesPipelineSaw(t *testing.T) {
	f := newFixture(t, queuetest.Start(t, "").Address, nil)
	request := newRequest(ids("ro", "at"), nil)
	spansOf(request)[0].SetName(identify.SpanAttempt)
	require.NoError(t, f.traces.ConsumeTraces(t.Context(), request))
	logs := plog.NewLogs()
	records := logs.ResourceLogs().AppendEmpty().ScopeLogs().AppendEmpty().LogRecords()
	records.AppendEmpty().SetTraceID(spansOf(request)[0].TraceID())
	records.AppendEmpty()
	bad := records.AppendEmpty()
	bad.Attributes().PutStr(identify.AttrRolloutID, "ro/1")
	bad.SetTimestamp(5)
	require.NoError(t, f.logs.ConsumeLogs(t.Context(), logs))
	out := f.lines.AllLogs()[0].ResourceLogs().At(0).ScopeLogs().At(0).LogRecords()
	require.Equal(t, []any{"ro", "at", nil}, idsOf(out.At(0).Attributes()))
	require.Zero(t, out.At(1).Attributes().Len())
	require.WithinDuration(t, time.Now(), out.At(1).ObservedTimestamp().AsTime(), time.Minute)
	require.Equal(t, []any{"", "", int64(0)}, idsOf(out.At(2).Attributes()))
	require.WithinDuration(t, time.Now(), out.At(2).Timestamp().AsTime(), time.Minute)
}

func TestStoppingWhatNeverStartedDoesNothing(t *testing.T) {
	config := createDefaultConfig().(*Config)
	made, err := NewFactory().CreateTraces(t.Context(), processortest.NewNopSettings(Type), config, consumertest.NewNop())
	require.NoError(t, err)
	require.NoError(t, made.Shutdown(t.Context()))
	require.True(t, made.Capabilities().MutatesData)
}

package agentlightningextension

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"agl-otel.internal/agentlightning/internal/refusals"
)

// What is counted of requests that are refused as a whole; metadata.yaml describes it (a test compares the two).
const (
	scopeName     = "agl-otel.internal/agentlightning/agentlightningextension"
	metricRefused = "otelcol_extension_agentlightning_refused_requests"
)

// Reasons of refusals, as in collector/refusals.py; failed is of this collector only: the Python one keeps such a request.
const (
	reasonUnauthorized = "unauthorized"
	reasonForbidden    = "forbidden"
	reasonUnknownPath  = "unknown_path"
	reasonOtherPort    = "other_protocol"
	reasonContentType  = "content_type"
	reasonEncoding     = "encoding"
	reasonTooLarge     = "too_large"
	reasonMalformed    = "malformed"
	reasonCrowded      = "crowded"
	reasonUnavailable  = "unavailable"
	reasonFailed       = "failed"
)

// Any client can cause as many refusals as it likes, so each reason logs one line in this time, of bounded length.
const (
	quietTime = time.Minute
	maxShown  = 300 // characters of an answer
)

// refused counts and logs refused requests.
type refused struct {
	counter metric.Int64Counter
	logger  *zap.Logger
	now     func() time.Time

	mu       sync.Mutex
	unlogged map[string]int       // since the last line of a reason
	quiet    map[string]time.Time // until when a reason logs nothing
}

func newRefused(settings component.TelemetrySettings) (*refused, error) {
	counter, err := settings.MeterProvider.Meter(scopeName).Int64Counter(metricRefused,
		metric.WithUnit("{request}"), metric.WithDescription("Requests that are refused as a whole."))
	return &refused{
		counter: counter, logger: settings.Logger, now: time.Now, unlogged: map[string]int{}, quiet: map[string]time.Time{},
	}, err
}

// add counts a request, and logs it with those since the last line of its reason; `answer` is what its client is told.
func (r *refused) add(transport, reason, answer string) {
	attributes := metric.WithAttributes(attribute.String("reason", reason), attribute.String("transport", transport))
	r.counter.Add(context.Background(), 1, attributes)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unlogged[reason]++
	now := r.now()
	if now.Before(r.quiet[reason]) {
		return
	}
	r.logger.Warn("refused requests", zap.String("reason", reason), zap.Int("requests", r.unlogged[reason]),
		zap.String("transport", transport), zap.String("answer", shown(answer)))
	r.unlogged[reason], r.quiet[reason] = 0, now.Add(quietTime)
}

// items logs that items of a request were refused alone, with those since the last such line; the processor counts them.
func (r *refused) items(rejected int64, why string) {
	const key = "items"
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unlogged[key] += int(rejected)
	now := r.now()
	if now.Before(r.quiet[key]) {
		return
	}
	r.logger.Warn("refused items", zap.Int("items", r.unlogged[key]), zap.String("last", shown(why)))
	r.unlogged[key], r.quiet[key] = 0, now.Add(quietTime)
}

// addError counts a request that is refused with this error.
func (r *refused) addError(transport string, err error) {
	if reason := reasonOf(err); reason != "" {
		r.add(transport, reason, status.Convert(err).Message())
	}
}

// shown is the beginning of a text, with characters that do not print replaced.
func shown(text string) string {
	return strings.Map(func(char rune) rune {
		if unicode.IsPrint(char) {
			return char
		}
		return utf8.RuneError
	}, fmt.Sprintf("%.*s", maxShown, strings.TrimSpace(text)))
}

// goneError is of a body that did not come whole: its client has most likely gone.
type goneError struct{ error }

func (g goneError) Unwrap() error { return g.error }

// reasonOf is the reason that a refusal with this error counts for; empty where it is not counted, as nobody waits for the answer.
func reasonOf(err error) string {
	var (
		full     fullError
		late     lateError
		tooLarge *http.MaxBytesError
		crowded  refusals.CrowdedError
		answered *recorder
		gone     goneError
	)
	switch {
	case errors.As(err, &full), errors.As(err, &late):
		return reasonUnavailable
	case errors.As(err, &tooLarge), errors.Is(err, errTooSlow):
		return reasonTooLarge
	case errors.Is(err, errEncoding):
		return reasonEncoding
	case errors.As(err, &crowded):
		return reasonCrowded
	case errors.As(err, &answered):
		return reasonOfHTTP(answered.status)
	case errors.As(err, &gone), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return ""
	}
	if found, is := status.FromError(err); is {
		return reasonOfGRPC(found.Code())
	}
	return reasonMalformed
}

// reasonOfHTTP is the reason of what the receiver answers.
func reasonOfHTTP(code int) string {
	switch code {
	case http.StatusBadRequest:
		return reasonMalformed
	case http.StatusUnauthorized:
		return reasonUnauthorized
	case http.StatusForbidden:
		return reasonForbidden
	case http.StatusNotFound, http.StatusMethodNotAllowed:
		return reasonUnknownPath
	case http.StatusUnsupportedMediaType:
		return reasonContentType
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		return reasonUnavailable
	default:
		return reasonFailed
	}
}

// reasonOfGRPC is reasonOfHTTP of the code from which the receiver makes its answer over HTTP.
func reasonOfGRPC(code codes.Code) string {
	switch code {
	case codes.InvalidArgument:
		return reasonMalformed
	case codes.Unauthenticated:
		return reasonUnauthorized
	case codes.PermissionDenied:
		return reasonForbidden
	case codes.Unimplemented:
		return reasonUnknownPath
	case codes.Unavailable, codes.ResourceExhausted, codes.DeadlineExceeded, codes.Aborted, codes.OutOfRange, codes.DataLoss:
		return reasonUnavailable
	case codes.Canceled:
		return ""
	default:
		return reasonFailed
	}
}

// refusedByGRPC is a stats.Handler that counts the calls which gRPC refuses before an interceptor sees them.
type refusedByGRPC struct{ *refused }

type callKey struct{}

// call of a method that exists.
type call struct{ arrived bool } // its message was read: what refuses it then counts it

// notArrived are the reasons of calls whose message is too large, of an unknown compression, or cannot be unpacked.
var notArrived = map[codes.Code]string{
	codes.ResourceExhausted: reasonTooLarge, codes.Unimplemented: reasonEncoding, codes.Internal: reasonMalformed,
}

// TagRPC implements stats.Handler.
func (refusedByGRPC) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if methods[info.FullMethodName] == nil {
		return ctx
	}
	return context.WithValue(ctx, callKey{}, &call{})
}

// HandleRPC implements stats.Handler.
func (r refusedByGRPC) HandleRPC(ctx context.Context, event stats.RPCStats) {
	one, is := ctx.Value(callKey{}).(*call)
	if !is {
		return
	}
	switch event := event.(type) {
	case *stats.InPayload:
		one.arrived = true
	case *stats.End:
		if reason := notArrived[status.Code(event.Error)]; reason != "" && !one.arrived {
			r.add("grpc", reason, status.Convert(event.Error).Message())
		}
	}
}

// TagConn implements stats.Handler.
func (refusedByGRPC) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (refusedByGRPC) HandleConn(context.Context, stats.ConnStats) {}

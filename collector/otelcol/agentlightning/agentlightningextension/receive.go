package agentlightningextension

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/collector/client"
	"go.opentelemetry.io/collector/extension/extensionmiddleware"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/refusals"
	"agl-otel.internal/agentlightning/internal/wire"
)

var (
	_ extensionmiddleware.HTTPServer = (*presence)(nil)
	_ extensionmiddleware.GRPCServer = (*presence)(nil)
)

const (
	protobufType = "application/x-protobuf"
	jsonType     = "application/json"
)

// signal is one of the three kinds of requests.
type signal struct {
	name     string
	request  string // its type
	rejected string // the field of a partial success in JSON that counts what was refused
}

var (
	traces  = &signal{"traces", "ExportTraceServiceRequest", "rejectedSpans"}
	logs    = &signal{"logs", "ExportLogsServiceRequest", "rejectedLogRecords"}
	metrics = &signal{"metrics", "ExportMetricsServiceRequest", "rejectedDataPoints"}

	paths   = map[string]*signal{"/v1/traces": traces, "/v1/logs": logs, "/v1/metrics": metrics} // the receiver's defaults
	methods = map[string]*signal{
		"/opentelemetry.proto.collector.trace.v1.TraceService/Export":     traces,
		"/opentelemetry.proto.collector.logs.v1.LogsService/Export":       logs,
		"/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": metrics,
	}
)

// GetHTTPHandler implements extensionmiddleware.HTTPServer. What comes to the receiver is unpacked (the receiver's own unpacking has no
// bound in members and seconds: `compression_algorithms: []` turns it off), parses, and comes once.
func (p *presence) GetHTTPHandler(context.Context) (extensionmiddleware.WrapHTTPHandlerFunc, error) {
	return func(ctx context.Context, base http.Handler) (http.Handler, error) {
		mux := http.NewServeMux()
		mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
			answer(w, map[string]any{"status": "ok", "service": "collector", "uptime_seconds": time.Since(p.started).Seconds()})
		})
		if p.config.Barrier {
			mux.HandleFunc("POST /barrier", func(w http.ResponseWriter, _ *http.Request) { answer(w, map[string]any{"status": "ok"}) })
		}
		mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
			if of := paths[r.URL.Path]; of != nil && r.Method == http.MethodPost {
				p.receive(w, r, of, base)
			} else {
				base.ServeHTTP(w, r)
			}
		})
		own := newOwnPages(ctx, p.config)
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Cross-Origin-Resource-Policy", "same-origin")
			if why := own.refusal(r); why != "" {
				http.Error(w, why, http.StatusForbidden)
				return
			}
			inTime(w, r, p.bodyTime)
			mux.ServeHTTP(w, r)
		}), nil
	}, nil
}

// receive gives the receiver a body that it can read, where the request has not come before, and answers for it.
func (p *presence) receive(w http.ResponseWriter, r *http.Request, of *signal, base http.Handler) {
	mine := place{room: p.room}
	defer mine.leave()
	body, err := p.readBody(r, &mine)
	media, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		refuse(w, media, err)
		return
	}
	info := client.FromContext(r.Context())
	headers := identify.Headers{RolloutID: r.Header.Get(identify.HeaderRolloutID), AttemptID: r.Header.Get(identify.HeaderAttemptID)}
	this := keyOf("http "+media, of.name, body, headers, info)
	found, err := p.resends.once(r.Context(), this, func(ctx context.Context) (outcome, error) {
		clean, err := cleaned(of.request, media, body, mine.grow)
		if err != nil {
			return outcome{}, err
		}
		ctx, refused := refusals.Within(ctx)
		inner := r.WithContext(ctx)
		inner.Header = r.Header.Clone()
		inner.Header.Del("Content-Encoding")
		inner.Body, inner.ContentLength = io.NopCloser(bytes.NewReader(clean)), int64(len(clean))
		answered := &unsent{header: http.Header{}, status: http.StatusOK}
		base.ServeHTTP(answered, inner)
		if answered.status != http.StatusOK {
			return outcome{}, answered
		}
		rejected, message := refused.Summary()
		return outcome{rejected, message}, nil
	})
	var failed *unsent
	switch {
	case errors.As(err, &failed):
		failed.send(w)
	case err != nil:
		refuse(w, media, err)
	default:
		raw, contentType := found.protobuf(), protobufType
		if media == jsonType {
			raw, contentType = found.json(of), jsonType
		}
		w.Header().Set("Content-Type", contentType)
		_, _ = w.Write(raw) // a client that has gone gets none
	}
}

// readBody takes room for what its client sends as it comes, as the Python collector does, and unpacks it when all is there: of a packed
// body only what it unfolds to is held then.
func (p *presence) readBody(r *http.Request, mine *place) ([]byte, error) {
	limit := p.config.MaxBodyBytes
	// In parts: io.ReadAll leaves garbage of several times the body.
	sent, err := mem.ReadAll(counted{io.LimitReader(r.Body, limit+1), mine.grow}, mem.DefaultBufferPool())
	defer sent.Free()
	if err != nil {
		return nil, err
	}
	if int64(sent.Len()) > limit {
		return nil, &http.MaxBytesError{Limit: limit}
	}
	encoding := strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding")))
	if encoding == "" || encoding == "identity" {
		return sent.Materialize(), nil
	}
	defer mine.shrink(int64(sent.Len()))
	packed := sent.Reader()
	defer func() { _ = packed.Close() }()
	return readBody(r.Context(), encoding, packed, limit, mine.grow)
}

// counted asks for room for what it has read.
type counted struct {
	io.Reader
	grow func(int64) error
}

func (c counted) Read(into []byte) (int, error) {
	n, err := c.Reader.Read(into)
	if full := c.grow(int64(n)); full != nil {
		return n, full
	}
	return n, err
}

// unsent is an answer of the receiver, which is an error where it is none that a request was taken.
type unsent struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (u *unsent) Header() http.Header            { return u.header }
func (u *unsent) WriteHeader(status int)         { u.status = status }
func (u *unsent) Write(part []byte) (int, error) { return u.body.Write(part) }
func (u *unsent) Error() string                  { return http.StatusText(u.status) }

func (u *unsent) send(w http.ResponseWriter) {
	maps.Copy(w.Header(), u.header)
	w.WriteHeader(u.status)
	_, _ = w.Write(u.body.Bytes()) // a client that has gone gets none
}

// protobuf is the answer to a request that was taken: the same fields for each signal.
func (o outcome) protobuf() []byte {
	if o.rejected == 0 {
		return nil
	}
	inner := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), uint64(o.rejected))
	inner = protowire.AppendString(protowire.AppendTag(inner, 2, protowire.BytesType), o.message)
	return protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), inner)
}

func (o outcome) json(of *signal) []byte {
	partial := map[string]string{}
	if o.rejected != 0 {
		partial = map[string]string{of.rejected: strconv.FormatInt(o.rejected, 10), "errorMessage": o.message}
	}
	raw, _ := json.Marshal(map[string]any{"partialSuccess": partial}) // texts always encode
	return raw
}

func cleaned(name, media string, body []byte, grow func(int64) error) ([]byte, error) {
	switch media {
	case protobufType:
		return wire.Clean(name, body, grow)
	case jsonType:
		return wire.CleanJSON(body, grow)
	default: // the receiver says what it takes
		return body, nil
	}
}

// refuse answers with a Status, as OTLP over HTTP wants it, in the sender's encoding.
func refuse(w http.ResponseWriter, media string, err error) {
	code, body := http.StatusBadRequest, &spb.Status{Code: int32(codes.InvalidArgument), Message: err.Error()}
	var tooLarge *http.MaxBytesError
	var full noRoom
	var late errLate
	switch {
	case errors.As(err, &full), errors.As(err, &late):
		code, body = http.StatusServiceUnavailable, status.Convert(refusal(err)).Proto()
		w.Header().Set("Retry-After", strconv.Itoa(int(retryDelay.Seconds())))
	case errors.As(err, &tooLarge), errors.Is(err, errTooSlow):
		code = http.StatusRequestEntityTooLarge
	case errors.Is(err, errEncoding):
		code = http.StatusUnsupportedMediaType
	}
	encode, contentType := protojson.Marshal, jsonType
	if media == protobufType {
		encode, contentType = proto.Marshal, protobufType
	}
	raw, _ := encode(body) // a code and a text always encode
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(code)
	_, _ = w.Write(raw) // a client that has gone gets none
}

func answer(w http.ResponseWriter, body map[string]any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body) // a client that has gone gets none
}

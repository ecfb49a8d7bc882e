package agentlightningextension

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	_ extensionmiddleware.HTTPServer = (*stackExtension)(nil)
	_ extensionmiddleware.GRPCServer = (*stackExtension)(nil)
)

const (
	protobufType = "application/x-protobuf"
	jsonType     = "application/json"
)

// signal is one of OTLP's signals.
type signal struct {
	name     string
	request  string // the type of its requests
	rejected string // the field of a partial success in JSON that counts refused items
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

// GetHTTPHandler implements extensionmiddleware.HTTPServer. The receiver gets bodies that are unpacked and can be parsed, and no resends.
// (Its own unpacking, without a bound on members and seconds, is turned off by `compression_algorithms: []`.)
func (e *stackExtension) GetHTTPHandler(context.Context) (extensionmiddleware.WrapHTTPHandlerFunc, error) {
	return func(ctx context.Context, base http.Handler) (http.Handler, error) {
		mux := http.NewServeMux()
		mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
			answer(w, map[string]any{"status": "ok", "service": "collector", "uptime_seconds": time.Since(e.started).Seconds()})
		})
		if e.config.Barrier {
			mux.HandleFunc("POST /barrier", func(w http.ResponseWriter, _ *http.Request) { answer(w, map[string]any{"status": "ok"}) })
		}
		mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
			if sig := paths[r.URL.Path]; sig != nil && r.Method == http.MethodPost {
				e.receive(w, r, sig, base)
			} else if why := twice(r.URL.Path); why != "" {
				e.refused.add("http", reasonUnknownPath, why)
				http.Error(w, why, http.StatusNotFound)
			} else {
				response := answerOf(base, r)
				if response.status >= http.StatusBadRequest {
					e.refused.addError("http", response)
				}
				response.send(w)
			}
		})
		own := newOwnPages(ctx, e.config)
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Cross-Origin-Resource-Policy", "same-origin")
			if r.Method == "PRI" && r.ProtoMajor == 2 { // the preface of a client that speaks HTTP/2; with a token it gets a 401 before
				why := otherPort(e.config.CollectorGRPC)
				e.refused.add("http", reasonOtherPort, why)
				w.Header().Set("Connection", "close")
				http.Error(w, why, http.StatusBadRequest)
				return
			}
			if why := own.refusal(r); why != "" {
				e.refused.add("http", reasonForbidden, why)
				http.Error(w, why, http.StatusForbidden)
				return
			}
			withinTime(w, r, e.bodyTime)
			mux.ServeHTTP(w, r)
		}), nil
	}, nil
}

// otherPort gives what a gRPC client is told at the port of HTTP, in the words of the Python collector.
func otherPort(grpc string) string {
	if grpc == "" {
		grpc = "another port"
	}
	return "this is the port of OTLP over HTTP; gRPC is at " + grpc + " (AGL_OTLP_GRPC_PORT)"
}

// twice gives the remedy for a path that has one of OTLP's twice: the endpoint that the SDK was given had it already; else nothing.
func twice(path string) string {
	for known := range paths {
		if strings.HasPrefix(path, known+"/v1/") {
			return fmt.Sprintf("this port has no %s: set OTEL_EXPORTER_OTLP_ENDPOINT without %s, which SDKs add", path, known)
		}
	}
	return ""
}

// receive passes a request to the receiver, unless it is a resend, and writes the response.
func (e *stackExtension) receive(w http.ResponseWriter, r *http.Request, sig *signal, base http.Handler) {
	held := hold{inFlight: e.inFlight}
	defer held.release()
	body, err := e.readBody(r, &held)
	media, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err == nil {
		err = checkAck(r.Header.Get(identify.HeaderAck))
	}
	if err != nil {
		e.refuse(w, media, err)
		return
	}
	info := client.FromContext(r.Context())
	headers := identify.Headers{RolloutID: r.Header.Get(identify.HeaderRolloutID), AttemptID: r.Header.Get(identify.HeaderAttemptID)}
	resendKey := keyOf("http "+media, sig.name, body, headers, info)
	result, err := e.once(r.Context(), resendKey, func(ctx context.Context) error {
		clean, err := cleaned(sig.request, media, body, held.grow)
		if err != nil {
			return err
		}
		inner := r.WithContext(ctx)
		inner.Header = r.Header.Clone()
		inner.Header.Del("Content-Encoding")
		inner.Body, inner.ContentLength = io.NopCloser(bytes.NewReader(clean)), int64(len(clean))
		response := answerOf(base, inner)
		if response.status != http.StatusOK {
			return response
		}
		return nil
	})
	if err != nil {
		e.refuse(w, media, err)
		return
	}
	raw, contentType := result.protobuf(), protobufType
	if media == jsonType {
		raw, contentType = result.json(sig), jsonType
	}
	w.Header().Set("Content-Type", contentType)
	_, _ = w.Write(raw) // fails only if the client has disconnected
}

// checkAck fails for an unknown ack level, in the words of the Python collector: its sender may want a stronger promise than it would get.
func checkAck(level string) error {
	switch level {
	case "", "durable", "stored":
		return nil
	}
	quoted := strconv.Quote(level)
	shown := "'" + quoted[1:len(quoted)-1] + "'"
	return fmt.Errorf("there is no ack level %.100s: %s is durable (as without it) or stored", shown, identify.HeaderAck)
}

// once passes a request to the receiver, unless it is a resend. The outcome has the items that the processor refused.
func (e *stackExtension) once(ctx context.Context, key requestKey, receive func(context.Context) error) (outcome, error) {
	return e.resends.once(ctx, key, func(ctx context.Context) (outcome, error) {
		ctx, refused := refusals.Within(ctx)
		if err := receive(ctx); err != nil {
			return outcome{}, refused.Error(err)
		}
		rejected, message := refused.Summary()
		if rejected != 0 {
			e.refused.items(rejected, message)
		}
		return outcome{rejected, message}, nil
	})
}

// readBody reads a whole body and unpacks it. As in the Python collector, its bytes count as held while they arrive, and those of a
// packed body no longer once it is unpacked.
func (e *stackExtension) readBody(r *http.Request, held *hold) ([]byte, error) {
	limit := e.config.MaxBodyBytes
	// In parts: io.ReadAll leaves garbage of several times the body.
	sent, err := mem.ReadAll(counted{io.LimitReader(r.Body, limit+1), held.grow}, mem.DefaultBufferPool())
	defer sent.Free()
	if err != nil {
		return nil, goneError{err}
	}
	if int64(sent.Len()) > limit {
		return nil, &http.MaxBytesError{Limit: limit}
	}
	encoding := strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding")))
	if encoding == "" || encoding == "identity" {
		return sent.Materialize(), nil
	}
	defer held.shrink(int64(sent.Len()))
	packed := sent.Reader()
	defer func() { _ = packed.Close() }()
	return readBody(r.Context(), encoding, packed, limit, held.grow)
}

// counted calls `grow` with the number of bytes of each read.
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

func answerOf(receiver http.Handler, r *http.Request) *recorder {
	response := &recorder{header: http.Header{}, status: http.StatusOK}
	receiver.ServeHTTP(response, r)
	return response
}

// recorder keeps the receiver's response; one that is no success is the error of the request.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header            { return r.header }
func (r *recorder) WriteHeader(status int)         { r.status = status }
func (r *recorder) Write(part []byte) (int, error) { return r.body.Write(part) }

// Error is what the response says.
func (r *recorder) Error() string {
	var told spb.Status
	if r.header.Get("Content-Type") == protobufType && proto.Unmarshal(r.body.Bytes(), &told) == nil {
		return told.GetMessage()
	}
	return r.body.String()
}

func (r *recorder) send(w http.ResponseWriter) {
	maps.Copy(w.Header(), r.header)
	w.WriteHeader(r.status)
	_, _ = w.Write(r.body.Bytes()) // fails only if the client has disconnected
}

// protobuf encodes the response to an accepted request, which has the same fields for each signal.
func (o outcome) protobuf() []byte {
	if o.rejected == 0 {
		return nil
	}
	inner := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), uint64(o.rejected))
	inner = protowire.AppendString(protowire.AppendTag(inner, 2, protowire.BytesType), o.message)
	return protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), inner)
}

func (o outcome) json(sig *signal) []byte {
	partial := map[string]string{}
	if o.rejected != 0 {
		partial = map[string]string{sig.rejected: strconv.FormatInt(o.rejected, 10), "errorMessage": o.message}
	}
	raw, _ := json.Marshal(map[string]any{"partialSuccess": partial}) // texts always encode
	return raw
}

func cleaned(name, media string, body []byte, grow func(int64) error) ([]byte, error) {
	switch media {
	case protobufType:
		return wire.Clean(name, body, grow)
	case jsonType:
		return wire.CleanJSON(name, body, grow)
	default: // the receiver refuses it
		return body, nil
	}
}

// refuse counts a request, and responds as the receiver did, or with a google.rpc.Status in the encoding of the request, as OTLP over HTTP
// requires.
func (e *stackExtension) refuse(w http.ResponseWriter, media string, err error) {
	e.refused.addError("http", err)
	var answered *recorder
	if errors.As(err, &answered) {
		answered.send(w)
		return
	}
	code, body := http.StatusBadRequest, &spb.Status{Code: int32(codes.InvalidArgument), Message: err.Error()}
	var tooLarge *http.MaxBytesError
	var full fullError
	var late lateError
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
	_, _ = w.Write(raw) // fails only if the client has disconnected
}

func answer(w http.ResponseWriter, body map[string]any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body) // fails only if the client has disconnected
}

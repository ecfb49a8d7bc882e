package agentlightningextension

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"reflect"
	"strings"
	"time"

	"go.opentelemetry.io/collector/extension/extensionmiddleware"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

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

// requestTypes are those of the receiver's default paths.
var requestTypes = map[string]string{
	"/v1/traces": "ExportTraceServiceRequest", "/v1/logs": "ExportLogsServiceRequest", "/v1/metrics": "ExportMetricsServiceRequest",
}

// GetHTTPHandler implements extensionmiddleware.HTTPServer. What comes to the receiver is unpacked (the receiver's own unpacking has no
// bound in members and seconds: `compression_algorithms: []` turns it off) and parses.
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
			if p.prepare(w, r) {
				base.ServeHTTP(w, r)
			}
		})
		own := newOwnPages(ctx, p.config)
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if why := own.refusal(r); why != "" {
				http.Error(w, why, http.StatusForbidden)
				return
			}
			mux.ServeHTTP(w, r)
		}), nil
	}, nil
}

// prepare gives a request the body that the receiver is to read; false where it was answered here.
func (p *presence) prepare(w http.ResponseWriter, r *http.Request) bool {
	name := requestTypes[r.URL.Path]
	if name == "" || r.Method != http.MethodPost {
		return true
	}
	body, err := readBody(r.Context(), strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))), r.Body, p.config.MaxBodyBytes)
	media, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err == nil {
		body, err = cleaned(name, media, body)
	}
	if err != nil {
		refuse(w, media, err)
		return false
	}
	r.Header.Del("Content-Encoding")
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return true
}

func cleaned(name, media string, body []byte) ([]byte, error) {
	switch media {
	case protobufType:
		return wire.Clean(name, body)
	case jsonType:
		return wire.CleanJSON(body)
	default: // the receiver says what it takes
		return body, nil
	}
}

// refuse answers with a Status, as OTLP over HTTP wants it, in the sender's encoding.
func refuse(w http.ResponseWriter, media string, err error) {
	code := http.StatusBadRequest
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge), errors.Is(err, errTooSlow):
		code = http.StatusRequestEntityTooLarge
	case errors.Is(err, errEncoding):
		code = http.StatusUnsupportedMediaType
	}
	body := &spb.Status{Code: int32(codes.InvalidArgument), Message: err.Error()}
	encode, contentType := protojson.Marshal, jsonType
	if media == protobufType {
		encode, contentType = proto.Marshal, protobufType
	}
	raw, _ := encode(body) // a code and a text always encode
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(code)
	_, _ = w.Write(raw) // the client has gone: nobody to tell
}

func answer(w http.ResponseWriter, body map[string]any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body) // the client has gone: nobody to tell
}

// GetGRPCServerOptions implements extensionmiddleware.GRPCServer.
func (p *presence) GetGRPCServerOptions(context.Context) ([]grpc.ServerOption, error) {
	return []grpc.ServerOption{grpc.ForceServerCodecV2(cleaning{encoding.GetCodecV2("proto")})}, nil
}

// cleaning is a codec that makes requests parse before it parses them.
type cleaning struct{ encoding.CodecV2 }

func (c cleaning) Unmarshal(data mem.BufferSlice, into any) error {
	parsed, is := into.(interface{ UnmarshalProto([]byte) error })
	if !is {
		return c.CodecV2.Unmarshal(data, into)
	}
	buffer := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buffer.Free()
	body, err := wire.Clean(reflect.TypeOf(into).Elem().Name(), buffer.ReadOnlyData())
	if err != nil {
		return err
	}
	return parsed.UnmarshalProto(body)
}

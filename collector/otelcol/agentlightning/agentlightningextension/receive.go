package agentlightningextension

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"go.opentelemetry.io/collector/extension/extensionmiddleware"
)

var _ extensionmiddleware.HTTPServer = (*presence)(nil)

// GetHTTPHandler implements extensionmiddleware.HTTPServer.
func (p *presence) GetHTTPHandler(context.Context) (extensionmiddleware.WrapHTTPHandlerFunc, error) {
	return func(_ context.Context, base http.Handler) (http.Handler, error) {
		mux := http.NewServeMux()
		mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
			answer(w, map[string]any{"status": "ok", "service": "collector", "uptime_seconds": time.Since(p.started).Seconds()})
		})
		mux.HandleFunc("POST /barrier", func(w http.ResponseWriter, _ *http.Request) { answer(w, map[string]any{"status": "ok"}) })
		mux.Handle("/", base)
		return mux, nil
	}, nil
}

func answer(w http.ResponseWriter, body map[string]any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body) // the client has gone: nobody to tell
}

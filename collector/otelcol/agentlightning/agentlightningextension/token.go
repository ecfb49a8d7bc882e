package agentlightningextension

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"strings"

	"go.opentelemetry.io/collector/extension/extensionauth"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
)

var (
	_ extensionauth.Server     = (*presence)(nil)
	_ extensionauth.GRPCClient = (*presence)(nil)

	errUnauthenticated = status.Error(codes.Unauthenticated,
		"this collector asks for a token: send `authorization: Bearer <AGL_TOKEN>` (OTEL_EXPORTER_OTLP_HEADERS)")
)

// Authenticate implements extensionauth.Server.
func (p *presence) Authenticate(ctx context.Context, sources map[string][]string) (context.Context, error) {
	if p.config.Token == "" {
		return ctx, nil
	}
	token := string(p.config.Token)
	wanted := [][]byte{[]byte("Bearer " + token), []byte("Bearer " + ingestKey(token))}
	for name, values := range sources {
		if !strings.EqualFold(name, "authorization") {
			continue
		}
		for _, value := range values {
			for _, key := range wanted {
				if subtle.ConstantTimeCompare([]byte(value), key) == 1 {
					return ctx, nil
				}
			}
		}
	}
	return ctx, errUnauthenticated
}

// ingestKey is the key with which agents send: agl_otel/ingest.py says why and how it is made.
func ingestKey(token string) string {
	mac := hmac.New(sha256.New, []byte(token))
	mac.Write([]byte("otlp"))
	return "agl-" + hex.EncodeToString(mac.Sum(nil))[:40]
}

// PerRPCCredentials implements extensionauth.GRPCClient: an exporter to another collector of ours shows the same token.
func (p *presence) PerRPCCredentials() (credentials.PerRPCCredentials, error) {
	return bearer(p.config.Token), nil
}

type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	if b == "" {
		return nil, nil
	}
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity: a stack inside one machine or one network may go without TLS.
func (b bearer) RequireTransportSecurity() bool { return false }

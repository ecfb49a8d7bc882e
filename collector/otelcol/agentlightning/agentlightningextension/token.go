package agentlightningextension

import (
	"context"
	"crypto/subtle"
	"net/http"
	"strings"

	"go.opentelemetry.io/collector/client"
	"go.opentelemetry.io/collector/extension/extensionauth"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"agl-otel.internal/agentlightning/internal/key"
)

var (
	_ extensionauth.Server     = (*stackExtension)(nil)
	_ extensionauth.GRPCClient = (*stackExtension)(nil)

	errUnauthenticated = status.Error(codes.Unauthenticated,
		"this collector asks for a token: send `authorization: Bearer <AGL_TOKEN>` (OTEL_EXPORTER_OTLP_HEADERS)")
)

// scheme comes before a token; its case does not matter.
const scheme = "Bearer "

// Authenticate implements extensionauth.Server. It adds an agent's key to the client's info.
func (e *stackExtension) Authenticate(ctx context.Context, sources map[string][]string) (context.Context, error) {
	if e.config.Token == "" {
		return ctx, nil
	}
	token := string(e.config.Token)
	for name, values := range sources {
		if !strings.EqualFold(name, "authorization") {
			continue
		}
		for _, value := range values {
			if len(value) < len(scheme) || !strings.EqualFold(value[:len(scheme)], scheme) { // RFC 9110, section 11.1
				continue
			}
			shown := value[len(scheme):]
			if equal(shown, token) {
				return ctx, nil
			}
			ids, bound := key.ReadBound(token, shown)
			if bound || equal(shown, key.Shared(token)) {
				info := client.FromContext(ctx)
				info.Auth = key.Holder{IDs: ids}
				return client.NewContext(ctx, info), nil
			}
		}
	}
	transport := "grpc"
	if ctx.Value(http.ServerContextKey) != nil {
		transport = "http"
	}
	e.refused.addError(transport, errUnauthenticated)
	return ctx, errUnauthenticated
}

func equal(shown, wanted string) bool {
	return subtle.ConstantTimeCompare([]byte(shown), []byte(wanted)) == 1
}

// PerRPCCredentials implements extensionauth.GRPCClient: exporters to another collector of the stack send the same token.
func (e *stackExtension) PerRPCCredentials() (credentials.PerRPCCredentials, error) {
	return bearer(e.config.Token), nil
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

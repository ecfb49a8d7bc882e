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

	errNoToken    = unauthenticated("no token was sent")
	errWrongToken = unauthenticated("this is no token or key of this stack")
	errEscaped    = unauthenticated("the header has %20 for the space after Bearer, because this sender does not decode it: write a space")
	errNoScheme   = unauthenticated("the Authorization header does not begin with `Bearer `")
)

// scheme comes before a token; its case does not matter.
const scheme = "Bearer "

// unauthenticated gives the error of a sender, in the words of the Python collector (agl_otel/net/auth.py).
func unauthenticated(why string) error {
	return status.Error(codes.Unauthenticated,
		why+": send `Authorization: Bearer KEY`, with the key that `agl-otel token --for otlp` prints, or with AGL_TOKEN")
}

// Authenticate implements extensionauth.Server. It adds an agent's key to the client's info.
func (e *stackExtension) Authenticate(ctx context.Context, sources map[string][]string) (context.Context, error) {
	if e.config.Token == "" {
		return ctx, nil
	}
	token, why := string(e.config.Token), errNoToken
	for name, values := range sources {
		if !strings.EqualFold(name, "authorization") {
			continue
		}
		for n, value := range values {
			if n == 0 { // the refusal is of the first one
				why = wrongForm(value)
			}
			if !hasScheme(value) {
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
	e.refused.addError(transport, why)
	return ctx, why
}

// wrongForm gives what is wrong with an Authorization header that has no valid token, by its form alone.
func wrongForm(value string) error {
	switch trimmed := strings.TrimSpace(value); {
	case trimmed == "" || strings.EqualFold(trimmed, strings.TrimSpace(scheme)):
		return errNoToken
	case hasScheme(value):
		return errWrongToken
	case len(value) > 9 && strings.EqualFold(value[:9], "bearer%20"):
		return errEscaped
	default:
		return errNoScheme
	}
}

func hasScheme(value string) bool {
	return len(value) >= len(scheme) && strings.EqualFold(value[:len(scheme)], scheme) // RFC 9110, section 11.1
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

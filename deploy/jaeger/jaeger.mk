# A real Jaeger for tests/system/test_jaeger.py, built from its Go module (its web page is a placeholder there). Included by the Makefile.
JAEGER_MODULE := github.com/jaegertracing/jaeger@v1.76.0

jaeger: ## build a Jaeger into build/jaeger, for the tests that look through one (needs Go; some ten minutes)
	@command -v go >/dev/null || { echo "make jaeger needs Go 1.24.6 or newer: https://go.dev/dl" >&2; exit 1; }
	@mkdir -p build/jaeger
	cd "$$(cd / && go mod download -json $(JAEGER_MODULE) | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')" \
	  && CGO_ENABLED=0 go build -trimpath -ldflags="-s -w" -o $(abspath build/jaeger/jaeger) ./cmd/jaeger

.PHONY: jaeger

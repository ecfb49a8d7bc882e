# The OpenTelemetry Collector as the collector. Included by the Makefile; paths are from the top of the project.
# The build is a plain `go build` of what the builder generated (distribution/ is committed, with go.mod and go.sum): no builder at build time.
# One job at a time: the ClickHouse and gRPC packages take a gigabyte each where they are compiled side by side.
OTELCOL_JOBS ?= 1
OTELCOL := build/otelcol/agl-otelcol
RACE := $(if $(shell command -v cc),-race)  # for vet, too: other flags are another compilation of all that is imported

otelcol: ## build the OpenTelemetry Collector with our processor into build/otelcol (needs Go)
	@command -v go >/dev/null || { echo "make otelcol needs Go 1.26 or newer: https://go.dev/dl" >&2; exit 1; }
	@mkdir -p $(dir $(OTELCOL))
	cd collector/otelcol/distribution && CGO_ENABLED=0 go build -p $(OTELCOL_JOBS) -trimpath -ldflags="-s -w" -o $(abspath $(OTELCOL)) .

test-otelcol: ## test the Go processor, with the race detector where there is a C compiler
	@command -v go >/dev/null || { echo "make test-otelcol needs Go 1.26 or newer: https://go.dev/dl" >&2; exit 1; }
	cd collector/otelcol/agentlightning && test -z "$$(gofmt -l .)" && go vet -p $(OTELCOL_JOBS) $(RACE) ./... \
	  && go test -p $(OTELCOL_JOBS) -vet=off $(RACE) ./...

.PHONY: otelcol test-otelcol

# The tool with which tests/unit/test_deploy.py tries compose.yaml; helm comes with the development packages. Included by the Makefile.
COMPOSE_MODULE := github.com/compose-spec/compose-go/v2/cmd@v2.16.2

compose-check: ## build Docker Compose's loader into build/tools, for the test that loads compose.yaml (needs Go; a quarter of a minute)
	@command -v go >/dev/null || { echo "make compose-check needs Go 1.24 or newer: https://go.dev/dl" >&2; exit 1; }
	@mkdir -p build/tools
	cd / && GOBIN=$(abspath build/tools) CGO_ENABLED=0 go install -trimpath $(COMPOSE_MODULE) && mv $(abspath build/tools)/cmd $(abspath build/tools)/compose-load

.PHONY: compose-check

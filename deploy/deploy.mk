# The tools with which tests/unit/test_deploy.py tries what is in deploy/, where they are not installed. Included by the Makefile.
HELM_MODULE := helm.sh/helm/v3/cmd/helm@v3.19.4
COMPOSE_MODULE := github.com/compose-spec/compose-go/v2/cmd@v2.16.2

helm: ## build helm into build/tools, for the tests that render the chart (needs Go; four minutes of CPU)
	@command -v go >/dev/null || { echo "make helm needs Go 1.24 or newer: https://go.dev/dl" >&2; exit 1; }
	@mkdir -p build/tools
	cd / && GOBIN=$(abspath build/tools) CGO_ENABLED=0 go install -trimpath $(HELM_MODULE)

compose-check: ## build Docker Compose's loader into build/tools, for the test that loads compose.yaml (needs Go; a quarter of a minute)
	@command -v go >/dev/null || { echo "make compose-check needs Go 1.24 or newer: https://go.dev/dl" >&2; exit 1; }
	@mkdir -p build/tools
	cd / && GOBIN=$(abspath build/tools) CGO_ENABLED=0 go install -trimpath $(COMPOSE_MODULE) && mv $(abspath build/tools)/cmd $(abspath build/tools)/compose-load

.PHONY: helm compose-check

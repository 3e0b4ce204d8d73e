PYTHON ?= python3
BIN := .venv/bin
# One more than the processors: most tests wait more than they compute.
JOBS ?= $(shell expr $$(nproc) + 1)
# Unit tests only compute.
QUICK = HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -n $(shell nproc) tests/unit
# Without compiled files each process of a test, such as a server, compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Tests that failed on a busy machine once, and those that hold durations, limits and counts of processes.
SENSITIVE = $(addprefix tests/conformance/test_,durations.py drain.py hostile_backends.py hostile_http2.py lifecycle_races.py \
  priorities.py scheduling.py trees.py tensorflow.py) tests/shell/front_processes/test_failures.py tests/shell/workers/test_segments.py

# What the server's image contains, its name, and the first program that can build it here.
VARIANT ?= cpu
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?= halimede:$(VERSION)$(patsubst %,-%,$(filter-out cpu,$(VARIANT)))
OPERATOR_IMAGE ?= halimede-operator:$(VERSION)
ENGINE ?= $(shell for engine in docker podman buildah; do $$engine info >/dev/null 2>&1 && echo $$engine && break; done)
# Only docker's image format has health checks. The isolation `chroot` works where buildah itself runs in a container.
FLAGS_podman := --format docker
FLAGS_buildah := --format docker --layers --isolation chroot
# How this machine reaches package registries: the build uses it, the image does not contain it.
BUILD_FLAGS = $(foreach name,PIP_INDEX_URL http_proxy https_proxy no_proxy,$(if $($(name)),--build-arg $(name))) \
  $(if $(PIP_CERT),--secret id=certificates$(,)src=$(PIP_CERT))
, := ,
# $(call build,DOCKERFILE,IMAGE NAME,FURTHER FLAGS)
define build
[ -n "$(ENGINE)" ] || { echo "Building an image needs docker, podman or buildah; none of them works here"; exit 1; }; \
DOCKER_BUILDKIT=1 $(ENGINE) build $(FLAGS_$(ENGINE)) --file $(1) \
  --tag $(2) --build-arg VERSION=$(VERSION) $(3) $(BUILD_FLAGS) .
endef

.PHONY: demo test affected test-all stress gpu check quick coverage bench bench-operator startup load rollouts autoscaling test-keda interop fuzz docs image images locks image-operator cluster cluster-down .venv

demo: .venv  ## train small models in each framework, serve and measure them; serve python models, kill the process of one
	$(BIN)/python -m halimede.demo

test: .venv  ## all checks and tests that a change must pass; writes build/durations.json
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder --budget=tests/budget.json

affected: .venv  ## the tests that the change reaches, for a minute; BASE=main compares with that commit
	$(BIN)/python tests/affected/run.py $(if $(BASE),--base $(BASE))

test-all: coverage  ## what `make test` leaves out: many repetitions, whole matrices, packages; before a capability is called done
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder -m large

stress: .venv  ## tests that measure time or count processes, or those of TESTS, beside four busy processes
	@for _ in 1 2 3 4; do sh -c 'while :; do :; done' & busy="$$busy $$!"; done; trap "kill $$busy" EXIT; \
	  $(BIN)/python -m pytest -n $(JOBS) $(or $(TESTS),$(SENSITIVE))

gpu: .venv  ## on a machine with an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu tests/gpu

check: .venv  ## lint, types and import contracts, without tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

quick: check  ## check, and the unit tests with few examples of each property: within a minute
	$(QUICK)

coverage: .venv  ## the share of the pure code that the unit tests run; fails below fail_under of pyproject.toml
	@mkdir -p build
	$(QUICK) --cov --cov-report=term

load: .venv  ## tests that take minutes each: overload, many connections, many models
	$(BIN)/python -m pytest -m load

rollouts: .venv  ## updates and lost pods, nodes and operators under load, in a cluster on this machine
	$(BIN)/python -m pytest -m "load or not load" tests/cluster/test_rollouts.py

autoscaling: .venv  ## replicas follow offered load, in a cluster on this machine with Prometheus and the real controller
	$(BIN)/python -m pytest -s -m "load or not load" tests/cluster/test_autoscaling.py

test-keda: .venv  ## KEDA scales a model, in a cluster on this machine; compiles KEDA once, for a quarter of an hour
	$(BIN)/python -m pytest -m keda tests/cluster/test_keda.py

interop: .venv  ## gRPC clients of other languages (Go, Node.js, Java), grpcurl and ghz; CI runs those of Python and Go
	$(BIN)/python -m pytest -m interop tests/conformance

image:  ## the server as an image; VARIANT=gpu, torch, tensorflow, openvino or trees for one with that extra
	@$(call build,Dockerfile.server,$(IMAGE),--build-arg VARIANT=$(VARIANT))

images: .venv  ## build each variant, or ONLY=torch, serve a model with it, and print its size; needs 25 GB of disk
	$(BIN)/python -m pytest -s -m images $(if $(ONLY),-k '$(ONLY)') tests/packaging/test_image_variants.py

locks:  ## what each variant installs beside server.lock, in the versions of requirements.lock; GPU's lock has its own command
	@for variant in torch tensorflow openvino trees; do \
	  { echo "# What the variant $$variant of the server's image installs beside server.lock; \`make locks\` writes it."; \
	    uv pip compile pyproject.toml --quiet --extra $$variant --constraint requirements.lock --universal \
	      --python-version 3.11 --generate-hashes --no-strip-extras --no-emit-index-url --no-annotate --no-header \
	      $$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' server/server.lock); \
	  } > server/$$variant.lock || exit 1; \
	done

image-operator:  ## the operator as an image
	@$(call build,Dockerfile.operator,$(OPERATOR_IMAGE))

cluster: .venv  ## a Kubernetes cluster on this machine, with the operator and a model; cluster-down stops it
	$(BIN)/python tests/cluster/run.py up

cluster-down: .venv
	$(BIN)/python tests/cluster/run.py down

fuzz: .venv  ## atheris on every decoder, SECONDS each; inputs that fail are saved in tests/fuzz/corpus
	$(BIN)/python -m pip install --quiet --require-hashes -r tests/fuzz/requirements.lock
	$(BIN)/python tests/fuzz/run.py --seconds $(or $(SECONDS),60)

docs: .venv  ## write the reference pages from the code, and build the site in docs/site
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --strict -f docs/zensical.toml

bench: .venv  ## measure ratios and CPU per request; prints JSON
	$(BIN)/python tests/bench/run.py

bench-operator: .venv  ## measure the operator with a thousand models, in a cluster on this machine; prints JSON
	$(BIN)/python tests/cluster/bench_operator.py

startup: .venv  ## measure the start of a model from no replica, TIMES times, in a cluster on this machine; prints JSON
	$(BIN)/python tests/cluster/bench_startup.py --times=$(or $(TIMES),10)

.venv: .venv/.stamp

# Rebuilt when a dependency or an entry point changes, by uv where it is installed and by pip elsewhere.
.venv/.stamp: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one with make PYTHON=..."; exit 1; }
	@if command -v uv >/dev/null; then \
	  set -ex; \
	  [ -x $(BIN)/python ] || uv venv --quiet --seed --python "$$(command -v $(PYTHON))" .venv; \
	  uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock; \
	  uv pip install --quiet --python $(BIN)/python --no-deps -e .; \
	else \
	  if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	      || { echo "$(PYTHON) cannot make virtual environments: install the package python3-venv"; exit 1; }; \
	    echo "Installing python3-venv, which this Python lacks"; \
	    export DEBIAN_FRONTEND=noninteractive; apt-get update -qq && apt-get install -y -qq python3-venv || exit 1; \
	  fi; \
	  set -ex; \
	  $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .; \
	fi
	@touch $@

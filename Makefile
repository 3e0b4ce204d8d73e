PYTHON ?= python3
BIN := .venv/bin
# Tests wait more than they compute.
JOBS ?= $(shell expr $$(nproc) + 1)
QUICK = HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -n $(JOBS) -m 'not load and not large' tests/unit

# An image: of which kind, under which name, and by the first of three programs that works here.
ACCELERATOR ?= cpu
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?= halimede:$(VERSION)$(if $(filter gpu,$(ACCELERATOR)),-gpu)
OPERATOR_IMAGE ?= halimede-operator:$(VERSION)
ENGINE ?= $(shell for engine in docker podman buildah; do $$engine info >/dev/null 2>&1 && echo $$engine && break; done)
# Docker's format alone has a health check; chroot works where buildah itself runs in a container.
FLAGS_podman := --format docker
FLAGS_buildah := --format docker --layers --isolation chroot
# How this machine reaches packages, handed to the build and left out of the image.
BUILD_FLAGS = $(foreach name,PIP_INDEX_URL http_proxy https_proxy no_proxy,$(if $($(name)),--build-arg $(name))) \
  $(if $(PIP_CERT),--secret id=certificates$(,)src=$(PIP_CERT))
, := ,
# $(call build,Dockerfile,name of the image,more flags)
define build
[ -n "$(ENGINE)" ] || { echo "An image is made by docker, podman or buildah, and none of them works here"; exit 1; }; \
DOCKER_BUILDKIT=1 $(ENGINE) build $(FLAGS_$(ENGINE)) --file $(1) \
  --tag $(2) --build-arg VERSION=$(VERSION) $(3) $(BUILD_FLAGS) .
endef

.PHONY: demo test check quick coverage bench bench-operator load fuzz docs image image-operator cluster cluster-down .venv

demo: .venv  ## train a small model, serve it, measure it; python models, one of them killed
	$(BIN)/python -m halimede.demo

test: check  ## everything that a change must pass
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder

check: .venv  ## the part of it that runs no test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

quick: check  ## a minute's part of the tests: check, and unit tests with few examples of each property
	$(QUICK)

coverage: .venv  ## which of the pure code's lines the unit tests run; fails below the floor in pyproject.toml
	@mkdir -p build
	$(QUICK) --cov --cov-report=term

load: .venv  ## the tests that take minutes: overload, many connections, many models
	$(BIN)/python -m pytest -m load

image:  ## the server as an image; ACCELERATOR=gpu for NVIDIA's GPUs
	@$(call build,Dockerfile.server,$(IMAGE),--build-arg ACCELERATOR=$(ACCELERATOR))

image-operator:  ## the operator as an image
	@$(call build,Dockerfile.operator,$(OPERATOR_IMAGE))

cluster: .venv  ## a whole Kubernetes on this machine, with the operator and a model; cluster-down ends it
	$(BIN)/python tests/cluster/run.py up

cluster-down: .venv
	$(BIN)/python tests/cluster/run.py down

fuzz: .venv  ## atheris on every decoder, SECONDS each; what it finds goes to tests/fuzz/corpus
	$(BIN)/python -m pip install --quiet --require-hashes -r tests/fuzz/requirements.lock
	$(BIN)/python tests/fuzz/run.py --seconds $(or $(SECONDS),60)

docs: .venv  ## the reference pages from the code, and the site, in docs/site
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --strict -f docs/zensical.toml

bench: .venv  ## ratios and CPU per request, as JSON
	$(BIN)/python tests/bench/run.py

bench-operator: .venv  ## what a thousand models cost the operator, in a Kubernetes on this machine, as JSON
	$(BIN)/python tests/cluster/bench_operator.py

.venv: .venv/.stamp

# Made anew when a dependency or an entry point changes; uv does it where it is installed, pip everywhere else.
.venv/.stamp: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; say which by make PYTHON=..."; exit 1; }
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

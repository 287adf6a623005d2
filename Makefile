# The only commands to remember; README, CONTRIBUTING and .ci/run call the same ones.
#
# Everything is made inside the project folder: .venv (Python and the built extension), target (Rust). The first run
# needs the network; after it nothing is fetched until requirements-dev.txt or Cargo.lock change.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env build demo test test-rust build-tests test-python test-torch test-torch-range test-faults soak test-frameworks check check-rust check-python sim fuzz asan miri audit bench bench-accuracy bench-scenarios bench-goodput bench-fairness bench-training bench-feedback bench-ns3 bench-memory bench-incast bench-hadamard bench-security bench-flood bench-topology bench-overhead bench-overlap bench-gpu bench-observability bench-kernel bench-own-cores bench-simulation bench-report ci clean distclean

PYTHON ?= python3
SEEDS ?= 20000
FROM ?= 0
FUZZ_SECONDS ?= 60
# Releases of PyTorch beside the one in .venv, which is the newest: see docs/torch.md.
TORCH_RANGE ?= 2.9.0 2.14.1
# Extra flags for pip, for example PIP_FLAGS='--no-index --find-links /media/wheels' on a machine without network.
PIP_FLAGS ?=
# Extra arguments for the demo, the tests and the benchmark, for example ARGS='--steps 50'.
ARGS ?=

VENV := .venv
# Has everything of .venv, and the training frameworks beside it.
FRAMEWORKS := .venv-frameworks
PY := $(VENV)/bin/python
RUST_SOURCES := $(shell find crates -path '*/src/*.rs' -o -name build.rs -o -name Cargo.toml)
LOCKED := --locked --offline

# PyO3 asks this interpreter; the same one everywhere, or cargo would rebuild when the shell's python differs.
export PYO3_PYTHON := $(CURDIR)/$(PY)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(VENV)/.requirements target/.fetched ## Make .venv with all requirements and fetch the Rust crates

build: $(VENV)/.extension ## Build the extension into .venv, which then has the gradwire command

demo: build ## Train over a small lossy network of this machine, gloo against gradwire
	$(VENV)/bin/gradwire demo $(ARGS)

test: test-rust test-python ## Every test: Rust, simulated seeds, Python with real processes

# The whole workspace again and not its crates with benches: their dependencies would get other features and be built anew.
test-rust: env build-tests ## The Rust tests, with at least 2,000 simulated seeds, and each bench of crates/*/benches once
	cargo test --workspace $(LOCKED)
	cargo test --workspace --bench '*' $(LOCKED)

build-tests: target/.fetched ## The Rust tests, without running them
	cargo test --workspace $(LOCKED) --no-run

# Three files at a time on two cores: half of a test's time it waits for a network or a timeout.
test-python: build ## The Python tests; ARGS='-k name' selects
	$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-faults: build ## Of the tests, every fault in every phase of a group, over real processes in a lab network
	$(PY) -m pytest tests/e2e/test_fault_matrix.py $(ARGS)

soak: build ## Churn: kill, stop, cut and bring back ranks of a training job in a lab network: make soak MINUTES=15 ARGS=--json=FILE
	$(PY) tests/soak/soak.py --minutes $(or $(MINUTES),15) $(ARGS)

test-torch: build ## PyTorch's own tests of torch.distributed at world size 2 and 4, and every collective beside gloo up to 8
	@mkdir -p bench-out
	GRADWIRE_TEST_ALL=1 $(PY) -m pytest tests/e2e/test_equality.py
	$(PY) tests/torch_suite/suite.py --json bench-out/torch_suite.json $(ARGS)

test-torch-range: build ## The tests that need torch most, with the lowest supported release and the one before the highest
	PIP_FLAGS='$(PIP_FLAGS)' ARGS='$(ARGS)' scripts/torch_range.sh $(TORCH_RANGE)

test-frameworks: build $(FRAMEWORKS)/.requirements ## The examples with Lightning, Accelerate and Ray Train, installed beside .venv
	$(FRAMEWORKS)/bin/python -m pytest tests/frameworks $(ARGS)

check: check-rust check-python ## Formatting, lints, types, and the repository's own rules

# Needs nothing of Python but an interpreter, so that it may run while packages are installed.
check-rust: target/.fetched ## Those of Rust, and the repository's own rules
	@scripts/require_tools.sh $(PYTHON) lint
	cargo fmt --all --check
	cargo clippy --workspace --all-targets $(LOCKED) -- -D warnings
	cargo run --quiet --package xtask $(LOCKED) -- check

check-python: env ## Those of Python
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

sim: env ## Simulate seeds and print each failing one: make sim FROM=0 SEEDS=20000 ARGS=--json
	cargo run --profile test --package gradwire-sim --bin gradwire-sim $(LOCKED) -- --from $(FROM) --seeds $(SEEDS) $(ARGS)

fuzz: env ## Fuzz the parsers and the connection: make fuzz FUZZ_SECONDS=600
	scripts/fuzz.sh $(FUZZ_SECONDS)

# Of the crates that handle memory and parse what arrives; leaks are not looked for, since the network thread outlives the tests.
asan: env ## The Rust tests of the protocol and the engine under AddressSanitizer; needs a nightly toolchain
	RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=0 cargo +nightly test $(LOCKED) --tests --target x86_64-unknown-linux-gnu \
		--target-dir target/asan -p gradwire-wire -p gradwire-core -p gradwire-collectives -p gradwire-engine -p gradwire-capi

miri: ## Unit tests of the crates without system calls under Miri; needs a nightly toolchain with it
	scripts/miri.sh

audit: ## Known vulnerabilities, licences and sources of the dependencies; needs cargo-deny
	@command -v cargo-deny >/dev/null || { echo "make audit needs cargo-deny: cargo install cargo-deny --locked" >&2; exit 1; }
	cargo deny check

bench: build ## The cost of a packet, and all-reduce beside gloo over shaped links
	cargo bench --package gradwire-core --package gradwire-collectives --package gradwire-engine $(LOCKED) -- --quick
	$(VENV)/bin/gradwire bench --loss 0 --loss 0.01 --json bench-out/bench.json $(ARGS)

bench-accuracy: build ## Time to accuracy of the example beside gloo, at five rates of loss, up to an hour
	$(VENV)/bin/gradwire bench --training --json bench-out/training.json $(ARGS)

bench-scenarios: build ## One gray rail of four, a slow host, an incast: p99 beside the healthy network, up to 40 minutes
	$(VENV)/bin/gradwire bench --scenario gray --json bench-out/gray.json --html bench-out/gray.html $(ARGS)
	$(VENV)/bin/gradwire bench --scenario slow-host --json bench-out/slow-host.json --html bench-out/slow-host.html $(ARGS)
	$(VENV)/bin/gradwire bench --scenario incast --json bench-out/incast-buffer.json --html bench-out/incast-buffer.html $(ARGS)

bench-goodput: build ## Goodput under loss beside the kernel's TCP, over a lab link
	$(PY) bench/transport/goodput.py --json bench-out/goodput.json $(ARGS)

bench-fairness: build ## Shares of gradwire and of one TCP flow at one bottleneck
	$(PY) bench/transport/fairness.py --json bench-out/fairness.json $(ARGS)

bench-training: build ## Quality of training under gradient loss, by method, 20 minutes
	$(PY) bench/training/loss_tolerance.py --json bench-out/loss_tolerance.jsonl $(ARGS)

bench-feedback: env ## What loss does to the sum of what is applied, by divisor and feedback: a model of the arithmetic, seconds
	$(PY) bench/training/feedback_variance.py $(ARGS)
	$(PY) bench/training/feedback_variance.py --fixed-owner $(ARGS)

bench-ns3: env ## The burst in ns-3 beside gradwire's own simulator (needs ns-3 and cmake, bench/ns3/README.md)
	cargo build --release --package gradwire-capi --package gradwire-sim $(LOCKED)
	cmake -S bench/ns3 -B build-ns3
	cmake --build build-ns3
	$(PY) bench/ns3/crosscheck.py $(ARGS)

bench-security: build ## What sealing every datagram costs, over loopback
	$(PY) bench/collective/security.py --json bench-out/security.json $(ARGS)

bench-flood: build ## What a stranger's flood costs a job, over a lab network
	$(PY) bench/collective/flood.py --json bench-out/flood.json $(ARGS)

bench-incast: build ## A small all-reduce by incast factor, in the simulator and over a lab network
	cargo test --package gradwire-sim --test all $(LOCKED) schedules::a_small -- --nocapture
	$(PY) bench/collective/incast.py --json bench-out/incast.json $(ARGS)

bench-hadamard: build ## What the Hadamard transform does against lost packets, and what it costs where none is lost
	$(PY) bench/collective/hadamard.py --json bench-out/hadamard.json $(ARGS)

bench-topology: env ## What best effort costs a ring, a parameter server and a transpose, in the simulator
	$(PY) bench/collective/topology_error.py --json bench-out/topology_error.json $(ARGS)

bench-simulation: build ## The papers' large simulations, hours: make bench-simulation FIGURE=scale (timeout, compression, jitter, ..)
	$(PY) bench/simulation/study.py $(or $(FIGURE),scale) $(ARGS)

bench-memory: build ## Peak memory of an all-reduce of 256 MB among 4 ranks, above the tensors
	$(PY) bench/collective/memory.py --json bench-out/memory.json $(ARGS)
	$(PY) bench/collective/memory.py --dtype bfloat16 --json bench-out/memory-bfloat16.json $(ARGS)

bench-overhead: build ## What a call and a step cost beside gloo, on this machine
	$(PY) bench/torch/overhead.py --json bench-out/overhead.json $(ARGS)

bench-overlap: build ## How much of a DDP step's communication is hidden, from a profile, with a picture
	$(PY) bench/torch/overlap.py --json bench-out/overlap.json $(ARGS)

bench-gpu: build ## DDP steps on a GPU beside gloo, and how much of the copies is hidden (needs a GPU)
	$(PY) bench/torch/gpu.py --json bench-out/gpu.json $(ARGS)

bench-observability: build ## What it costs a training step that it can be seen
	$(PY) bench/torch/observability.py --json bench-out/observability.json $(ARGS)

bench-kernel: build ## What the kernel alone takes to carry a GB, by the way it is handed over: a minute
	$(PY) bench/collective/kernel_cost.py --json bench-out/kernel-cost.json $(ARGS)

OWN_CORES = GRADWIRE_SECURITY=$${GRADWIRE_SECURITY:-off} $(PY) bench/collective/own_cores.py -- $(VENV)/bin/gradwire bench --network bridge --ranks 2 --size 100 --preset exact --tcp cubic --samples 10 --settle 45
bench-own-cores: build ## All-reduces in clear of two ranks whose threads have slow cores of their own, with one thread, one that sends beside it, and two and three network threads: two minutes, as root
	GRADWIRE_NETWORK_THREADS=1 GRADWIRE_SEND_THREAD=off $(OWN_CORES) $(ARGS)
	GRADWIRE_NETWORK_THREADS=1 GRADWIRE_SEND_THREAD=on $(OWN_CORES) $(ARGS)
	GRADWIRE_NETWORK_THREADS=2 $(OWN_CORES) $(ARGS)
	GRADWIRE_NETWORK_THREADS=3 $(OWN_CORES) $(ARGS)

bench-report: env ## Write what the last two runs measured into docs/benchmarks.md and docs/img
	$(PY) bench/report.py bench-out/goodput.json bench-out/fairness.json

ci: check test ## All that a change needs to pass

clean: ## Remove what the build made; keeps .venv's packages
	rm -rf target $(VENV)/.extension demo-out bench-out .pytest_cache .ruff_cache .mypy_cache
	rm -f python/gradwire/_native*.so

distclean: clean ## Remove .venv as well
	rm -rf $(VENV) $(FRAMEWORKS)

$(PY):
	@scripts/require_tools.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.requirements: requirements-dev.txt | $(PY)
	$(PY) -m pip install $(PIP_FLAGS) --requirement requirements-dev.txt
	@touch $@

$(FRAMEWORKS)/.requirements: requirements-frameworks.txt $(VENV)/.requirements
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(FRAMEWORKS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(FRAMEWORKS)/bin/python -m pip install $(PIP_FLAGS) --requirement requirements-frameworks.txt
	@touch $@

# Crates that are already on this machine are not asked for again, so that a machine without network can build.
target/.fetched: Cargo.lock | $(PY)
	@mkdir -p target
	cargo fetch --quiet $(LOCKED) 2>/dev/null || cargo fetch --locked
	@touch $@

$(VENV)/.extension: $(VENV)/.requirements target/.fetched pyproject.toml Cargo.toml Cargo.lock $(RUST_SOURCES)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(PY) -m maturin develop --release $(LOCKED)
	@touch $@

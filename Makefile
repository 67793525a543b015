# Two commands: `make serve` and `make test`. Everything they need is installed into .venv, from pinned versions.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= config.yaml
PEERS_VENV ?= .venv-peers
SCENARIO ?= smoke
URL ?= http://127.0.0.1:8000
WORKERS ?= --numprocesses 2
FLASH_TESTS := $(addprefix tests/,kernels/test_flash.py kernels/test_choice.py $(patsubst %,engine/execution/gpu/test_%.py,decode executor memory model))
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: serve test test-seeds test-processors test-slow test-clients test-clients-newest record-clients test-gpu test-flash test-chaos test-chaos-short test-deep test-mutations check format install model docs docs-site load simulate find-rate bench-peers bench-gpu chart studies validate-k8s render-k8s k8s-tools image sbom clean

serve: install ## prepare the model of config.yaml, start the server, and print how to call it once it answers
	@exec $(BIN)/serve run $(CONFIG)

# Bytecode is kept even if the environment says otherwise: otherwise each of the hundreds of processes that tests start
# compiles the same modules again, which takes half a second.
test test-seeds test-processors test-slow test-chaos test-chaos-short: export PYTHONDONTWRITEBYTECODE :=

# A third on two cores: the one that runs the servers mostly waits.
test: WORKERS = --numprocesses 3
test: model ## run the test suite, without the tests that take minutes
	$(BIN)/python -m pytest $(WORKERS) -m "not slow and not chaos and not clients"

# Those that draw, by themselves or with what draws for them.
DRAWING_TESTS = $(shell grep -rlE 'hypothesis|support\.seeds|tests\.kernels\.(rows|states|experts_case)|triton\.cases' tests --include='test_*.py' --exclude-dir=gpu)

test-seeds: model ## run the random tests with a new seed, which is printed; CHUNKSERVE_TEST_SEED repeats one
	@export CHUNKSERVE_TEST_SEED=$${CHUNKSERVE_TEST_SEED:-$$(shuf -i 1-999999999 -n 1)}; \
	echo "CHUNKSERVE_TEST_SEED=$$CHUNKSERVE_TEST_SEED"; \
	$(BIN)/python -m pytest $(WORKERS) -m "not slow and not chaos and not clients and not server" $(DRAWING_TESTS)

test-processors: model ## run the tests that compare bits as on other processors, with instructions hidden from NumPy, torch and the native kernels (some minutes)
	$(BIN)/python -m tests.processors -- $(WORKERS)

test-slow: model ## run the tests that take minutes: `make serve` in a fresh clone, kernels in Triton's interpreter, loads, every command of loadtest/README.md
	$(BIN)/python -m pytest $(WORKERS) -m slow

test-clients: model .venv-clients/installed .clients-npm/installed ## run client programs and libraries through a task each, in environments of their own (some minutes)
	$(BIN)/python -m pytest tests/clients -m clients -rs

.venv-clients/installed: tests/clients/requirements.txt tests/clients/requirements-aider.txt tests/clients/install.sh
	PYTHON=$(PYTHON) tests/clients/install.sh pinned python .venv-clients

.clients-npm/installed: tests/clients/package.json tests/clients/package-lock.json tests/clients/install.sh
	tests/clients/install.sh pinned npm .clients-npm

# For a scheduler, and not for what a change must pass: others may break it any day. As cron has it, each Monday at three:
#   0 3 * * 1  cd CHECKOUT && git pull --quiet && make test-clients-newest
test-clients-newest: model ## the same with the newest release of each client; meant for a schedule, since any release may break it
	PYTHON=$(PYTHON) tests/clients/install.sh newest python .venv-clients-newest
	tests/clients/install.sh newest npm .clients-npm-newest
	CLIENTS_VENV=.venv-clients-newest CLIENTS_NPM=.clients-npm-newest $(BIN)/python -m pytest tests/clients -m clients -rs

record-clients: model .venv-clients/installed .clients-npm/installed ## run the client programs and keep the requests that they send, which `make test` replays
	$(BIN)/python -m tests.clients.record

# Nothing is installed: a GPU's machine may have no network, and its own torch and Triton. An installed .venv is used.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_OUT ?= loadtest/runs/gpu
test-gpu: ## test kernels, captured steps, overlap and memory on this machine's GPU (without one it says so); results to GPU_OUT
	$(GPU_PYTHON) tests/gpu/first_hour.py --out $(GPU_OUT) --phases right

# Torch 2.4 leaves more of itself untyped, which says nothing of ours.
test-flash: .venv-flash/installed ## test the engine with vllm-flash-attn 2.6.2 and the torch 2.4.0 that it pins: types, attention, steps on a stand-in for a GPU (3 GB)
	.venv-flash/bin/python -m mypy --no-warn-return-any --allow-untyped-calls --no-warn-unused-ignores -p engine -p kernels
	.venv-flash/bin/python -c "import vllm_flash_attn"
	.venv-flash/bin/python -m pytest $(FLASH_TESTS) -rs

.venv-flash/installed: pyproject.toml
	$(PYTHON) -m venv .venv-flash
	.venv-flash/bin/python -m pip install --quiet --editable ".[flash]" hypothesis mypy pillow pytest
	@touch $@

bench-gpu: ## measure kernels, steps and loads on this machine's GPU, against its own peaks; results to GPU_OUT
	$(GPU_PYTHON) tests/gpu/first_hour.py --out $(GPU_OUT) --phases where aims

test-chaos: model ## inject every fault into a real Ray cluster: killed, hung, drained and replaced parts, storms of clients (a quarter of an hour)
	$(BIN)/python -m pytest tests/chaos tests/k8s/test_pods.py -rP

KILLS = test_streams_go_on_unchanged_while_engines_are_killed_at_random[40]

test-chaos-short: model ## inject one fault of each kind: killed and hung engines, a cut channel, an emptied pod (five minutes)
	$(BIN)/python -m pytest "tests/chaos/test_replicas.py::$(KILLS)" tests/chaos/test_hangs.py tests/chaos/test_channel.py tests/k8s/test_pods.py -rP

test-deep: install ## run the engine through 100,000 new random lives, 10,000 with lower tiers, and 5,000 of ranks in lockstep; tests/deep.json keeps the last results (an hour)
	$(BIN)/python -m tests.deep

test-mutations: install ## revert the scheduler's fixes one by one; each must be caught by a test (half an hour)
	$(BIN)/python -m tests.mutations

check: install ## lint, check types and import contracts, and build the documentation: no dead link, no page without a place
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install ## regenerate the generated pages of docs/: settings, metrics, fields, routes, commands, errors, rules, pictures
	$(BIN)/python -m docsite

docs-site: install ## build the documentation strictly and serve it on http://127.0.0.1:8001; it follows changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict --dev-addr 127.0.0.1:8001

load: install ## run a named load on a server and report on it: make load SCENARIO=rates URL=http://... LOAD="--rates 1,2,4"
	$(BIN)/python -m loadtest.load --scenario $(SCENARIO) --url $(URL) $(LOAD)

simulate: install ## run a named load on simulated engines: make simulate SCENARIO=rates LOAD="--rates 1,2 --replicas 4"
	$(BIN)/python -m loadtest.sim.load --scenario $(SCENARIO) $(LOAD)

find-rate: install ## find the highest rate at which a server keeps its limits: make find-rate LOAD="--goal ttft:500,tpot:50"
	$(BIN)/python -m loadtest.find_rate --url $(URL) $(LOAD)

COMPARISON ?= run
bench-peers: model $(PEERS_VENV)/installed ## compare with vLLM and Ray Serve LLM on this machine (three quarters of an hour; installs them, 4 GB), or with COMPARISON=beside streams beside long prompts with vLLM, or with COMPARISON=llama_cpp with llama.cpp (builds it); BENCH="--rounds 1"
	$(if $(filter llama_cpp,$(COMPARISON)),[ -x $(PEERS_VENV)/bin/llama-server ] || PYTHON=$(PYTHON) benchmarks/peers/llama_cpp.sh $(PEERS_VENV))
	$(BIN)/python -m benchmarks.peers.$(COMPARISON) --peers-venv $(PEERS_VENV) $(BENCH)

$(PEERS_VENV)/installed: benchmarks/peers/env.sh
	PYTHON=$(PYTHON) benchmarks/peers/env.sh $(PEERS_VENV)
	@touch $@

chart: install ## draw docs/peers.svg and write the tables of docs/benchmarks/peers.md, from loadtest/results/peers.json
	$(BIN)/python -m benchmarks.peers.chart

STUDY ?= autoscaling routing reservation scale disruption targets
studies: install ## run the simulations of loadtest/sim/README.md (hours; needs the traces in ../shared/data or CHUNKSERVE_DATA); STUDY=routing STUDY_ARGS="--seeds 1"
	for study in $(STUDY); do $(BIN)/python -m loadtest.sim.studies $$study $(STUDY_ARGS) || exit 1; done
	$(BIN)/python -m loadtest.sim.validation
	$(BIN)/python -m loadtest.sim.plots

# Without a network, an older release's form will do: the tests that need the other fail by themselves.
model: install ## download and verify the default model, and convert it to both of its forms, unless that was done before
	@$(BIN)/python -m engine.checkpoints.prepare --quantize both >/dev/null || $(BIN)/python -m engine.checkpoints.prepare >/dev/null

install: $(VENV)/installed

# torch first and by itself: a package that asks for it earlier, or more loosely, brings gigabytes of CUDA.
$(VENV)/installed: pyproject.toml constraints.txt scripts/serve
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "chunkserve needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,k8s,load]"
	@install -m 755 scripts/serve $(BIN)/serve
	$(BIN)/python -m kernels.cpu.native.library
	@touch $@

validate-k8s: install k8s-tools ## build every overlay of k8s/ and its Helm chart, and check them without a cluster, with its alerts and dashboards; and check compose.yaml
	$(BIN)/python -m k8s.validate

render-k8s: install k8s-tools ## regenerate k8s/rendered, the dashboards, the schema of the chart's values and compose/rules.yaml, which tests compare
	$(BIN)/python -m k8s.dashboards
	$(BIN)/python -m k8s.validate --render

k8s-tools: install ## download kubectl, helm, promtool, hadolint and the Compose schema to .k8s-tools, unless they are there
	@$(BIN)/python -m k8s.validate.tools

# Debian's packages mmdebstrap and buildah, and root: see docs/how-to/compose.md.
image: install ## build the image without a daemon as build/chunkserve.oci.tar, and start a server from it: make image IMAGE="--show HOST:PATH"
	$(BIN)/python -m k8s.image --out build/chunkserve.oci.tar $(IMAGE)
	$(BIN)/python -m pytest tests/k8s/built_image.py -rP

sbom: install .venv-sbom/installed ## write what an installed server consists of to build/sbom.cdx.json, in CycloneDX's format
	$(BIN)/python -m k8s.sbom --tool .venv-sbom/bin

.venv-sbom/installed: k8s/sbom-requirements.txt
	$(PYTHON) -m venv .venv-sbom
	.venv-sbom/bin/python -m pip install --quiet --requirement k8s/sbom-requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-clients .clients-npm .venv-clients-newest .clients-npm-newest .venv-flash $(PEERS_VENV) .k8s-tools .venv-sbom

# Two commands: `make serve` and `make test`. Everything they need is installed into .venv, from pinned versions.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= config.yaml
PEERS_VENV ?= .venv-peers
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: serve test test-slow test-clients test-chaos test-deep test-mutations check format install model docs bench-peers chart clean

serve: install ## prepare the model of config.yaml, serve it, and say how to call it once it answers
	@$(BIN)/python -m serve_app.front.announce $(CONFIG) & exec $(BIN)/serve run $(CONFIG)

test: model ## the whole suite but for what takes minutes
	$(BIN)/python -m pytest -m "not slow and not chaos and not clients"

test-slow: model ## a fresh clone in a new virtual environment, through the README's two commands
	$(BIN)/python -m pytest -m slow

test-clients: model .venv-clients/installed ## the libraries that users bring, in an environment of their own (some minutes)
	$(BIN)/python -m pytest tests/clients -m clients

.venv-clients/installed: tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --no-deps --requirement tests/clients/requirements.txt
	@touch $@

test-chaos: model ## every fault over a real Ray: killed, hung, drained and replaced parts, clients that storm (ten minutes)
	$(BIN)/python -m pytest tests/chaos -rP

test-deep: install ## 100,000 random lives of the engine, new ones each time; tests/deep.json keeps the last result (half an hour)
	$(BIN)/python -m tests.deep

test-mutations: install ## revert the scheduler's fixes one by one; each must be caught by a test (some minutes)
	$(BIN)/python -m tests.mutations

check: install ## lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install ## write README's configuration reference anew
	$(BIN)/python -m serve_app.reference README.md

bench-peers: model $(PEERS_VENV)/installed ## compare with vLLM and Ray Serve LLM on this machine (half an hour; installs them, 4 GB); BENCH="--rounds 1"
	$(BIN)/python -m loadtest.peers --peers-venv $(PEERS_VENV) $(BENCH)

$(PEERS_VENV)/installed: loadtest/peers_env.sh
	PYTHON=$(PYTHON) loadtest/peers_env.sh $(PEERS_VENV)
	@touch $@

chart: install ## draw docs/peers.svg and write README's tables of it, from loadtest/results/peers.json
	$(BIN)/python -m loadtest.chart

model: install ## download, verify and convert the default model, once
	@$(BIN)/python -m engine.prepare >/dev/null

install: $(VENV)/installed

# torch first and by itself: a package that asks for it earlier, or more loosely, brings gigabytes of CUDA.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
	  || { echo "chunkserve needs Python 3.11 or 3.12; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[serve,dev]"
	$(BIN)/python -m kernels.cpu.native.library
	@touch $@

clean:
	rm -rf $(VENV) .venv-clients $(PEERS_VENV)

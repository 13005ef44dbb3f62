# `make run` and `make test` work as first commands: each makes .venv with the pinned versions when it is missing.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
# Processes that share the tests, file by file. Most of a job's test is starting processes and waiting for them.
WORKERS ?= 2
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: run test test-sglang sglang quick soak lint format bench setup clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: $(STAMP)  ## create .venv with the pinned versions

$(STAMP): setup.cfg constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

sglang: $(SGLANG_STAMP)  ## create .venv-sglang: the SGLang server for machines without a GPU (3.4 GB)

# The list is complete, so nothing is resolved: PyPI's sglang asks for CUDA kernels, which tools/sglang_cpu stands in for.
$(SGLANG_STAMP): constraints-sglang.txt
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-sglang.txt
	@touch $@

run: $(STAMP)  ## train the tiny omni model by GRPO on this machine (ARGS="key=value ...")
	$(BIN)/python pipelines/omni_grpo.py $(ARGS)

lint: $(STAMP)  ## formatter, linter, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## everything that has to hold
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-sglang: $(STAMP) $(SGLANG_STAMP)  ## the tests against real SGLang servers
	$(BIN)/python -m pytest -m sglang tests/sglang

quick: lint  ## the tests that take seconds
	$(BIN)/python -m pytest -m "not slow and not sglang"

soak: $(STAMP)  ## search the state machines of the queue for hundreds of thousands of steps
	SEARCH_TIMES=30 $(BIN)/python -m pytest tests/unit/flight/state tests/unit/flight/broker/test_plans.py -k "Lives or Keeps"

bench: $(STAMP)  ## the bus against its peers; rewrites the figures in BENCHMARKS.md
	$(BIN)/python tools/bench_bus.py --cache .bench-venv --chart docs/bench_bus.svg --write BENCHMARKS.md $(ARGS)

format: $(STAMP)  ## rewrite the code in house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what the targets made, except data/ and runs/
	rm -rf $(VENV) $(SGLANG_VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache

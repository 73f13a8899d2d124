# octavo's everyday commands; `make` alone lists them.
#
#   PYTHON    the Python that makes .venv (3.11 or newer)
#   JOBS      test files that run at a time (0: all in one process)
#   PIP_ARGS  more arguments for every pip install, such as --index-url or --proxy

PYTHON   ?= python3
PIP_ARGS ?=
VENV     ?= .venv
PROMPT   ?= Why is the sky blue? Answer in one sentence.
ARGS     ?=

BIN      := $(VENV)/bin
PIP      := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
INPUTS   := pyproject.toml setup.py constraints.txt
TEST_CASE ?= tests
JOBS     ?= 2
GPU_TESTS ?= tests/gpu tests/ops/gpu tests/runner tests/sampling tests/models tests/engine

.DEFAULT_GOAL := help
.PHONY: help demo chat test test-gpu lint format bench clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18
	@echo
	@echo "  Linux without a GPU: PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'"
	@echo "  keeps pip from fetching torch's CUDA build, which is several GB larger."

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "octavo needs Python 3.11 or newer; set PYTHON=/path/to/it"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(INPUTS) | $(BIN)/python
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(INPUTS) | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

demo: $(VENV)/.installed  ## install, fetch the default model, answer PROMPT="...", show the memory
	@$(BIN)/octavo models pull
	@printf '\n> %s\n\n' "$$PROMPT"
	@$(BIN)/octavo generate --memory $(ARGS) -- "$$PROMPT"

export PROMPT

chat: $(VENV)/.installed  ## talk with the default model
	@$(BIN)/octavo chat $(ARGS)

test: $(VENV)/.installed-test  ## install what the tests need and run them; ARGS="-k name"
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TEST_CASE) $(ARGS)

test-gpu: $(VENV)/.installed-test  ## run on an NVIDIA GPU the tests that it makes a difference to
	OCTAVO_TEST_DEVICE=cuda $(BIN)/python -m pytest $(GPU_TESTS) $(ARGS)

lint: $(VENV)/.installed-dev  ## ruff, ruff format, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## let ruff put code and imports in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed  ## tokens per second, and latency, on this machine
	$(BIN)/octavo bench throughput $(ARGS)
	$(BIN)/octavo bench latency $(ARGS)

clean:  ## remove .venv, builds and caches (models stay: octavo models rm)
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/octavo/ops/cpu/_octavo_cpu*

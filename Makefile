# The one place that pins the CPU set-up. `make serve` and `make test` need nothing but git, make and Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
TORCH_CPU ?= torch==2.13.0
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: serve test lint setup
serve: setup
	$(BIN)/minserve launch

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH_CPU)"
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

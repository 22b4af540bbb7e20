# The one place that pins the CPU set-up. `make serve` and `make test` need nothing but git, make and Python 3.11 or newer.
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell $(name) $(NEW_ENOUGH) 2>/dev/null && echo $(name))))
VENV ?= .venv
# Processes of the test suite; each needs about a gigabyte.
JOBS ?= 2
# The CPU build of torch is small; the plain name may bring gigabytes of CUDA. It is taken from wherever pip is set up to look, or
# from TORCH_INDEX (PyTorch's install page names the one for CPUs); else the plain build does as well.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

BIN := $(VENV)/bin
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
export OMP_NUM_THREADS ?= 1

.PHONY: serve test lint map setup
serve: setup
	$(BIN)/minserve launch $(FLAGS)

test: setup
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

# After a file came, went or changed what it is for.
map: setup
	$(BIN)/python -m tools.readme_map

setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "minserve needs Python 3.11 or newer; none of python3, python3.11 ... python3.14 is that. Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) $(NEW_ENOUGH) 2>/dev/null || { echo "minserve needs Python 3.11 or newer, and $(PYTHON) is older (or missing). Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module. On Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version): a few minutes, once" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)" "$(TORCH)","$(TORCH)+cpu") 2>/dev/null || $(PIP) install "$(TORCH)"
	@$(PIP) install --editable ".[dev]"
	@touch $@

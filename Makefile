# `make demo` and `make test` are all a newcomer needs; both make .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt

# One process a core, each with one thread; the tests of a file stay together, as they share fixtures and workers.
PARALLEL := OMP_NUM_THREADS=1
SPREAD := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# The tests start many programs: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test suite test-slow test-kernels coverage bench docs lint style types install install-dev clean help

help:
	@echo "make demo       five methods on four hospitals, who weighs most with whom, and a report (two minutes with installation)"
	@echo "make install    .venv with the command fedc2i, nothing else"
	@echo "make test       ruff, mypy and the test suite"
	@echo "make coverage   the test suite with its coverage, at least 90 %; takes half as long again"
	@echo "make test-slow  the tests that take minutes"
	@echo "make test-kernels  the tests of GPU kernels, in Triton's interpreter; no GPU is needed"
	@echo "make bench      speed and memory against a hand-written loop (about nine minutes)"
	@echo "make docs       the documentation site, into site/"
	@echo "make lint       ruff and mypy only"

demo: install
	$(BIN)/fedc2i compare local fedavg fedproto fedc2i pooled --data heart --seeds 0,1,2 --out $(DEMO)
	$(BIN)/fedc2i report $(DEMO) --metric balanced_accuracy --out $(DEMO)/report.html

# mypy takes a minute or two of one core, so it runs beside the tests.
test: style
	@$(MAKE) --no-print-directory -j2 types suite

suite: install-dev
	$(PARALLEL) $(BIN)/python -m pytest $(SPREAD) --durations=10

coverage: install-dev
	$(PARALLEL) $(BIN)/python -m pytest $(SPREAD) --cov --cov-report=term --cov-fail-under=90

test-slow: install-dev
	$(BIN)/python -m pytest -m slow

# Apart from other packages, as runs name an installed Triton. The interpreter of 3.6 fails with NumPy 2.4.
TRITON := $(VENV)/triton-3.7.1

test-kernels: install-dev $(TRITON)
	$(PARALLEL) TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest tests/engine/test_gpu_layers.py tests/engine/test_own_layers.py tests/engine/test_winograd.py

$(TRITON): | $(BIN)/python
	@echo "Installing Triton (190 MB, Linux only) into $(TRITON) ..."
	@rm -rf $@.new; $(PIP) install --quiet --no-deps --target $@.new triton==$(patsubst triton-%,%,$(notdir $@)) && mv $@.new $@

bench: install-dev
	$(BIN)/python -m benchmarks

docs: install-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: style types

style: install-dev
	$(BIN)/ruff check src tests benchmarks experiments examples docs/hooks.py
	$(BIN)/ruff format --check src tests benchmarks experiments examples docs/hooks.py

types: install-dev
	$(BIN)/mypy

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedc2i needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing fedc2i and its pinned dependencies into $(VENV) ..."
	@$(INSTALL) -e '.[report,table]'
	@touch $@

$(VENV)/.installed-dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing fedc2i with its development tools into $(VENV) ..."
	@$(INSTALL) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .coverage

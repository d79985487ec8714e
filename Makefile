# Every target sets up what it needs, and no more: a virtual environment in .venv with this package and its tools.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
# Code is compiled when it is first imported: most of what these packages bring never is.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# The tests run in parallel; each worker uses one thread.
WORKERS ?= 2

SEED ?= 0

.PHONY: help test test-slow test-all soak claims lint format bench demo docs clean

help:
	@echo "make test    set up and run the tests that take seconds: about four minutes"
	@echo "make test-all  run all tests; make test-slow those that make test leaves out"
	@echo "make soak    property tests on every text, image and seq2seq model, SEED=0, and 10,000 damaged files: hours"
	@echo "make claims  run the experiments behind docs/claims.md: more than an hour; QUICK=1 smaller ones"
	@echo "make lint    ruff, format check and type check"
	@echo "make bench   speed and memory, as ratios measured in one run"
	@echo "make docs    the documentation, in site/"
	@echo "make demo    prune a real model, with data that comes with package installs"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) torch==2.13.0
	$(INSTALL) --editable '.[dev]'
	touch $(READY)

# The demo needs no test, lint or documentation tools.
$(DEMO_READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up: PyTorch, transformers, and the demo's weights and strings. This takes a minute or two."
	@$(INSTALL) torch==2.13.0
	@$(INSTALL) --editable '.[demo]'
	@touch $(DEMO_READY)

# What is slow, tests/tiers.py says.
test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

test-all: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS)

soak: $(READY)
	HEADPRUNE_SOAK=$(SEED) $(BIN)/python -m pytest -n $(WORKERS) tests/unit/test_properties.py
	$(BIN)/python -m benchmarks.fuzz_readers

# With QUICK=1 smaller ones; OPTIONS may name more subjects, such as --images FILE.npz.
claims: $(READY)
	$(BIN)/python -m benchmarks.claims $(if $(QUICK),--quick) $(OPTIONS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks

demo: $(DEMO_READY)
	@$(BIN)/headprune demo

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

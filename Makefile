# Two commands: `make serve` runs the server, `make test` runs every check of the fast lane.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?=
DEVICE ?= auto
HOST   ?= 127.0.0.1
PORT   ?= 8000
WORKERS ?= 2
SOURCES := $(shell find kernels -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt')

.PHONY: help setup serve test test-fast test-slow lint format types imports clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## create .venv and install the package with what its tests need

$(VENV)/.installed: pyproject.toml constraints.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[cpu,dev]'
	touch $@

serve: setup ## serve MODEL (default: a small chat model) on HOST:PORT, with DEVICE=auto
	$(BIN)/octavo serve $(MODEL) --device $(DEVICE) --host $(HOST) --port $(PORT)

test: lint imports ## linter, type-checker, import contracts and the fast tests
	$(MAKE) --no-print-directory --jobs 2 types test-fast

test-fast: setup # beside it the type-checker has finished before the first third of the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-slow: setup ## the long tests
	$(BIN)/python -m pytest -m slow --timeout 3600

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

imports: setup
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

format: setup ## format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

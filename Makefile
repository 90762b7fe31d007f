# Needs make and Python 3.11 or 3.12; everything else goes into .venv and the cache (~/.cache/kvshuttle).
#
#   make serve   prefill engine + decode engine + router with a small real model, until Ctrl-C
#   make demo    the same, a scripted two-turn chat, a table of what moved, and out
#   make test    everything that must hold: checks, fast tests, then tests on real engines (an hour and a quarter on two cores)
#   make check   formatting, lint, types, import contracts
#
# Options: PORT=9000, PYTHON=python3.12, ARGS="--decode 2" (options of `kvshuttle up`), PYTEST_ARGS="-k chat".

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
TEST_DIRS := $(wildcard tests/house tests/unit tests/property tests/contract tests/integration tests/e2e)

.PHONY: help serve demo test check fast-test setup setup-dev clean

help:
	@sed -n 's/^#  *\(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

serve: setup
	@$(VENV_PYTHON) -m kvshuttle up --port $(or $(PORT),8000) $(ARGS)

demo: setup
	@$(VENV_PYTHON) -m kvshuttle demo --port $(or $(PORT),0) $(ARGS)

test: check
	@$(VENV_PYTHON) -m kvshuttle model
	@$(VENV_PYTHON) -m pytest $(TEST_DIRS) $(PYTEST_ARGS)

fast-test: setup-dev
	@$(VENV_PYTHON) -m pytest $(TEST_DIRS) -m "not e2e and not long" $(PYTEST_ARGS)

check: setup-dev
	@$(VENV_PYTHON) -m ruff format --check --quiet .
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m mypy
	@.venv/bin/lint-imports

setup:
	@$(PYTHON) scripts/setup.py

setup-dev:
	@$(PYTHON) scripts/setup.py --dev

clean:
	rm -rf .venv .setup.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

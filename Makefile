# Everything runs in .venv, which is made when first needed.
#   PYTHON=       the interpreter for it, 3.11 or newer
#   TORCH_INDEX=  an index to take torch from, such as one of CPU-only builds
#   TORTURE_DIR=  where `make torture` keeps its campaign of kills; it goes on with one it finds
#   TORTURE_KILLS= how many kills the campaign has

SHELL := /bin/bash
PYTHON ?= python3
TORCH_INDEX ?=
TORTURE_DIR ?= runs/torture
TORTURE_KILLS ?= 200
ENV := .venv
BIN := $(ENV)/bin
SOURCES := pyproject.toml setup.py constraints.txt $(shell find csrc -name '*.[ch]' -o -name '*.py')

# Builds in isolation are pinned too. Older and newer pip read different names.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test slow check torture docs clean

help:
	@echo "make demo     trains the quickstart, 85.6 M parameters within 400 MiB"
	@echo "make test     runs the tests that take seconds"
	@echo "make slow     runs those that take minutes in all"
	@echo "make check    format, lint, types, import layers, C warnings"
	@echo "make torture  runs these in all combinations, then kills a run 200 times"
	@echo "make docs     runs the code in README and docs and checks their links"
	@echo "make clean    removes .venv and what was built; runs/ stays"

demo: $(ENV)/.installed
	@run_dir="runs/demo-$$(date +%Y%m%d-%H%M%S)"; \
	trap 'rm -rf "$$run_dir/store"' EXIT; \
	$(BIN)/offload train examples/quickstart.toml --run-dir "$$run_dir"

# Tests wait for drives and threads, so two at a time take little more than half the time.
SEVERAL := --numprocesses=auto --maxprocesses=4 --dist=worksteal

test: $(ENV)/.installed-test
	@scripts/test $(SEVERAL)

slow: $(ENV)/.installed-test
	@scripts/test -m "slow and not alone and not stress and not gpu" $(SEVERAL) --durations=10
	@scripts/test -m "slow and alone and not stress and not gpu" --durations=10

check: $(ENV)/.installed-test
	@scripts/check

torture: $(ENV)/.installed-test
	@scripts/test -m "slow or stress"
	@$(BIN)/python tests/fault/torture.py $(TORTURE_DIR) --kills $(TORTURE_KILLS)

docs: $(ENV)/.installed-test
	@scripts/test tests/unit/test_docs.py

clean:
	rm -rf $(ENV) build dist *.egg-info offload/_native/*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find offload policies tests csrc -name __pycache__ -type d -prune -exec rm -rf {} +

$(ENV)/.python:
	@echo "== making $(ENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11 or missing: set PYTHON=" >&2; exit 2; }
	@$(PYTHON) -m venv --clear $(ENV)
	@touch $@

$(ENV)/.torch: $(ENV)/.python constraints.txt
ifneq ($(TORCH_INDEX),)
	@echo "== installing torch from $(TORCH_INDEX): a large download"
	@$(PIP_INSTALL) --no-deps --index-url "$(TORCH_INDEX)" torch
endif
	@touch $@

$(ENV)/.installed: $(ENV)/.torch $(SOURCES)
	@echo "== installing offload and what it needs: torch is a large download, minutes at first"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(ENV)/.installed-test: $(ENV)/.torch $(SOURCES)
	@echo "== installing offload with its test tools: torch is a large download, minutes at first"
	@$(PIP_INSTALL) --editable '.[test]'
	@touch $@ $(ENV)/.installed

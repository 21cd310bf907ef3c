# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Test processes, one per core. A file stays in one process: its tests share models that take seconds to make.
WORKERS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all lint bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-9s %s\n' "$$name" "$$text"; done

setup: $(INSTALLED) ## make .venv and install into it (the other targets do it themselves)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("deepinfer needs Python 3.11 or newer, set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

run: $(INSTALLED) ## complete a few sample prompts with the bundled model
	$(BIN)/python examples/offline_inference.py

test: $(INSTALLED) ## all tests but the slow ones; WORKERS=1 for a single process
	$(PYTEST) -m 'not slow' tests

test-all: $(INSTALLED) ## all tests, the slow ones too
	$(PYTEST) tests

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED) ## model, drafting, host time per step, prefix cache, codec, grammars, server, to results/*.json; PEER=python of a vLLM venv
	$(BIN)/python benchmarks/cpu_throughput.py --output results/cpu_throughput.json
	$(BIN)/python benchmarks/dspark.py --output results/dspark.json
	$(BIN)/python benchmarks/host_overhead.py --output results/host_overhead.json $(if $(PEER),--peer-python $(PEER))
	$(BIN)/python benchmarks/prefix_cache.py --output results/prefix_cache.json
	$(BIN)/python benchmarks/codec.py --output results/codec.json
	$(BIN)/python benchmarks/codec_parse.py --output results/codec_parse.json
	$(BIN)/python benchmarks/grammar.py --output results/grammar.json
	$(BIN)/python benchmarks/structured_output.py --output results/structured_output.json
	$(BIN)/python benchmarks/serving.py --output results/serving.json

clean: ## remove .venv, caches and results
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist results

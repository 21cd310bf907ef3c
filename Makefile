# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: run test test-all lint bench setup clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("deepinfer needs Python 3.11 or newer, set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

run: $(INSTALLED)
	$(BIN)/python examples/offline_inference.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -m 'not slow' tests

test-all: $(INSTALLED)
	$(BIN)/python -m pytest tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/cpu_throughput.py --output results/cpu_throughput.json

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist results

# `make demo`, `make study-quick` and `make test` each make the virtual environment, install what they need, and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo study-quick test lint types clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"stretto needs Python 3.11 or newer, found {sys.version.split()[0]}; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/stretto demo

study-quick: $(VENV)/.installed
	$(BIN)/python benchmarks/study.py --quick

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

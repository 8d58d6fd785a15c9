# Everything a fresh machine needs is made by the targets themselves: `make test` on a fresh clone sets up, then passes.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.PHONY: help setup test check bench clean

help:
	@echo "make test    set up, then run the whole test suite"
	@echo "make check   lint and type-check"
	@echo "make bench   run the benchmarks that need no GPU"

# The stamp depends on pyproject.toml, so a changed dependency installs at the next target.
setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m benchmarks.step_cost

clean:
	rm -rf $(VENV) build dist *.egg-info

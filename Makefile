# Everything runs in .venv, which the first target that needs it creates.
# PIP_FLAGS go to every pip install: say, an index with CPU-only wheels of torch.

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# mypy finds the package by name whatever this folder is called.
MYPY := MYPYPATH=$(VENV)/typing $(BIN)/mypy
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)

.PHONY: help demo test test-models bench lint format clean

help:
	@echo "make demo         compile a real model and compare it with eager PyTorch"
	@echo "make test         linters, type checker, tests"
	@echo "make test-models  tests on full-size models"
	@echo "make bench        all models against eager PyTorch and Inductor (ARGS=... goes along)"
	@echo "make lint         linters and type checker; make format rewrites the sources"
	@echo "make clean        remove what the others made"

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 -e '.[test]'
	mkdir -p $(VENV)/typing
	ln -sfn ../.. $(VENV)/typing/flambeau
	touch $@

demo: $(READY)
	@$(BIN)/python -m flambeau.tools.demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MYPY)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/pytest -n 2 $(ARGS)

test-models: $(READY)
	$(BIN)/pytest -m full tests $(ARGS)

bench: $(READY)
	@$(BIN)/flambeau bench $(ARGS)

clean:
	rm -rf $(VENV) *.egg-info build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

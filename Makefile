# Every target sets itself up: a fresh clone needs nothing but Python 3.10+ and make.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test check bench fuzz clean

BIN := .venv/bin
READY := .venv/.ready
# Extra arguments, e.g. make test ARGS="tests/store -x"
ARGS ?=

help:  ## What can be made
	@grep -hE '^[a-z]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 10

$(READY): pyproject.toml constraints.txt scripts/setup.sh $(wildcard tests/integration/requirements*.txt)
	@bash scripts/setup.sh

demo: $(READY)  ## Warm the bundled drafters, train one on 4 threads, prove that none traced
	@$(BIN)/aotcache demo $(ARGS)

# One process per folder of tests, since the tests of a folder share what they compile.
test: $(READY)  ## The whole test suite
	@$(BIN)/python -m pytest -n auto --no-loadscope-reorder $(ARGS)

check: $(READY)  ## Lint and types: ruff, mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(READY)  ## Every benchmark: tables here, JSON in bench/results/
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[bench]'
	@$(BIN)/python -m bench $(ARGS)

fuzz: $(READY)  ## Coverage-guided fuzzing of every parser; ARGS="--seconds 600 archive" for one of them
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[fuzz]'
	@$(BIN)/python -m tests.fuzz $(ARGS)

clean:  ## Remove the virtual environment and the caches of the tools
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build *.egg-info

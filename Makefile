# Every command of the project; `make help` lists them.

SHELL := bash
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

# Directory of the environment.
export VENV ?= .venv
# Interpreter that makes it; empty finds one.
export PYTHON ?=
# Empty for the CPU lock; `vllm` for the ordinary wheel on a GPU machine.
EXTRA ?=
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
# Where tests with an engine lie, and those without; tests/contracts holds them to that.
ENGINES := tests/docs tests/e2e tests/engine tests/unit/wheel
PLAIN := tests/contracts tests/docs tests/unit
# What a run compiles the next one reads: pytest rewrites every file of tests in each process.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo demo-real test nightly real real-core architectures check fast env lint types imports docs dist lock hooks clean

# Several processes share the cores, and threads of one that wait for each other take them from all.
check fast test nightly: export OMP_NUM_THREADS ?= 1

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 11

demo: env  ## make the environment and run the demonstration, all of it on this machine
	@$(PY) -m evals.demo

demo-real: env  ## truth (with DATA=FOLDER) and lies in a real model, which is downloaded once
	@$(PY) -m gallery.demo $(if $(DATA),--data "$(DATA)")

test: env  ## run everything that runs on a CPU: lint, types, imports, docs, every tier of tests
	@# Each step runs even where an earlier one failed, so that one run tells all. Tests wait a good
	@# deal, those with engines most: so there are five processes for two cores. Those that share an
	@# engine share a process, and no test without one comes into it. What these print comes last.
	@failed=; $(MAKE) --keep-going --jobs=2 --output-sync=target types docs lint imports \
	    || failed=" types, docs, lint or imports"; \
	  plain=$$(mktemp); \
	  $(PYTEST) -m "not engine and not gpu and not nightly" -n 2 \
	    --durations=25 $(PLAIN) > $$plain 2>&1 & waits=$$!; \
	  trap "kill -INT $$waits 2> /dev/null; rm -f $$plain" EXIT; \
	  $(PYTEST) -m "engine and not gpu and not nightly" -n 3 --dist loadscope --durations=25 \
	    $(ENGINES) || failed="$$failed engines"; \
	  wait $$waits || failed="$$failed pytest"; cat $$plain; \
	  [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

nightly: env  ## run the long tests that `make test` leaves out; docs/contributing.md lists them
	@$(PYTEST) -m "nightly and not gpu" -n 2 --dist loadscope $(ENGINES) tests/unit

real: env  ## run the tests on three real models, which are downloaded once; make their table
	@$(PYTEST) -m real -n 0 tests/real --durations=10 --real-results tests/real/results.json
	@$(PY) -m tests.kit.generated

architectures: env  ## compare a tiny model of each architecture with Hugging Face; make their table
	@$(PYTEST) -n 0 tests/engine/test_architectures.py --durations=10 \
	  --architecture-results tests/engine/architectures.json
	@$(PY) -m tests.kit.generated

real-core: env  ## the same on the smallest of them
	@$(PYTEST) -m real -n 0 tests/real --durations=10 -k "smollm2 or liar"

check: env  ## the fast part, for before a commit: lint, types, imports, contracts, unit
	@# Side by side: mypy takes one core, and tests wait a good deal.
	@$(MAKE) --keep-going --jobs=4 --output-sync=target fast types lint imports

fast: env
	@$(PYTEST) -q -m "not engine and not gpu and not nightly and not slow" -n 3 \
	  tests/contracts tests/unit

env:  ## make .venv from requirements/cpu.lock (EXTRA=vllm: the ordinary vLLM wheel)
	@bash requirements/env.sh $(EXTRA)

lint: env  ## ruff: rules and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: env  ## mypy, strict
	@$(PY) -m mypy

imports: env  ## the direction of imports between folders
	@$(VENV)/bin/lint-imports --no-logo

docs: env  ## build the documentation into site/, strictly, and run what tests text
	@# Not quiet: MkDocs then drops warnings before `--strict` counts them.
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@$(PYTEST) -q tests/text

dist: env  ## build wheel and sdist, and the wheel of the organism, into dist/
	@$(PY) -m uv build --no-build-isolation --python $(PY)
	@$(PY) -m uv build --no-build-isolation --python $(PY) --wheel --out-dir dist organism

lock: env  ## resolve requirements/cpu.lock anew
	@$(PY) -m uv pip compile --universal --python-version 3.11 --no-header --no-annotate --quiet \
	  $(if $(PIP_FIND_LINKS),$(addprefix --find-links ,$(PIP_FIND_LINKS)),--torch-backend=cpu) \
	  pyproject.toml --extra cpu --extra train --extra docs --extra dev --extra petri \
	  --extra control --extra sentinel --extra scout requirements/cpu.in \
	  --override requirements/overrides.txt --upgrade --output-file requirements/.universal
	@$(PY) requirements/lock.py < requirements/.universal > requirements/.filtered
	@mv requirements/.filtered requirements/cpu.lock
	@rm requirements/.universal

hooks: env  ## run the checks of `make check` that are quick at each commit
	@$(VENV)/bin/pre-commit install

clean:  ## remove the environment, caches and built documentation
	@rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` and `make test` set everything up first; a second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The versions that .ci/run has tested. `make setup CONSTRAINTS=` takes the newest ones instead.
CONSTRAINTS ?= constraints.txt
NEEDS_3_11 = 0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed, and " + sys.executable + " is %d.%d: install one, remove $(VENV), then e.g. make PYTHON=python3.12 $(MAKECMDGOALS)" % sys.version_info[:2]
# Run several test files at a time, each in its own process: tests often wait, so two cores serve six
# files, or four of the slow tests, which start more ranks. The ten slowest and the total come last.
FILES_AT_A_TIME := 4
test: FILES_AT_A_TIME := 6
PYTEST = $(BIN)/python -m pytest -n $(FILES_AT_A_TIME) --dist loadfile --no-loadscope-reorder --durations=10
# Threads that wait must not spin while other tests need the cores.
test test-slow test-engines test-long: export OMP_WAIT_POLICY := passive

# Keep compiled modules: tests start hundreds of interpreters, and pytest rewrites every assert.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-engines test-long expectations constraints lint clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | awk -F'|' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv and install the project there

$(READY): pyproject.toml setup.py $(CONSTRAINTS)
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit($(NEEDS_3_11))'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit($(NEEDS_3_11))'
	@# The first import compiles what it needs; compiling everything here takes half a minute more.
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS)) -e ".[dev]"
	@touch $(READY)

demo: $(READY) ## train VGG-11 in all four ways on digits and compare them (minutes, no download)
	@$(BIN)/python -m lab.demo

test: $(READY) ## run the tests that every change must pass (minutes)
	$(PYTEST) --ignore=tests/engines -m "not slow and not mutation and not long"

test-slow: $(READY) ## run the slow tests with those of the engines, and check that every planted mistake is caught
	$(PYTEST) -m "(slow or mutation or engines) and not long"

test-engines: $(READY) ## run only the tests of ssh, Slurm and Kubernetes
	$(PYTEST) -m "not long" tests/engines

test-long: $(READY) ## run the tests that take many minutes (not in CI)
	$(PYTEST) -m long -o faulthandler_timeout=0

expectations: $(READY) ## record again what users see (after an intended change)
	$(BIN)/python -m tests.helpers.expectations

lint: $(READY) ## check format, style, import layers and types
	$(BIN)/ruff format --check --quiet . || { echo "not formatted: run $(BIN)/ruff format ."; exit 1; }
	$(BIN)/ruff check --quiet .
	git ls-files '*.md' ':!reports/samples' | xargs $(BIN)/mdformat --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/vermin --quiet --no-tips --target=3.8- lab/audit/probe

constraints: ## write the newest versions that fit into constraints.txt (then run the tests)
	rm -rf $(VENV)
	$(MAKE) setup CONSTRAINTS=
	$(BIN)/python -m pip list --format=freeze --exclude-editable --disable-pip-version-check \
		| grep -vE '^(pip|setuptools)==' > constraints.txt
	@touch $(READY)

clean: ## remove the environment and caches; reports and data stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache build *.egg-info

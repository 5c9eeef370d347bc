# Targets for users: demo. For developers: test, check, sim, clean. All work on a fresh clone.

PYTHON ?= python3
VENV   := .venv
BIN    := $(CURDIR)/$(VENV)/bin
PACKAGES := clusterctl scheduler nodeagent neuron_runtime jobs

.PHONY: demo test check sim clean

# The marks say which extras are installed; a new pyproject.toml installs again.
$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.jax: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[jax]'
	touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/.jax

# A cluster of its own in demo-result/, the training job on it, its result; then the cluster goes.
demo: $(VENV)/.jax
	@BIN='$(BIN)' sh jobs/demo.sh demo-result; code=$$?; \
	find $(PACKAGES) -name __pycache__ -prune -exec rm -rf {} +; exit $$code

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_sizes.py

# Seeded random histories of both cores under faults: make sim SEED=1 COUNT=500 STEPS=100
SEED  ?= 1
COUNT ?= 500
STEPS ?= 100
sim: $(VENV)/.dev
	$(BIN)/python -m scheduler.sim --seed $(SEED) --count $(COUNT) --steps $(STEPS)

clean:
	rm -rf $(VENV) demo-result build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests -name __pycache__ -prune -exec rm -rf {} +

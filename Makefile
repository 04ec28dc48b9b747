# Each target does its own set-up: a fresh clone and Python 3.11 or newer are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two sets of packages in one .venv: what Lehr needs to run, and what its tests need besides.
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal -q  # neighbours share compiled programs

.PHONY: demo test test-all test-long lint types format bench figures docs docs-serve clean

# PPO on CartPole with an annealed entropy coefficient: the progress, an evaluation, and the curve with its coefficients.
demo: $(RUN)
	rm -rf runs/demo
	$(BIN)/lehr train ppo --env CartPole-v1 --total-steps 100k --evaluate-every 100k --target-return 475 \
		--entropy-coef "0.03 -> 0.001 cosine" --learning-rate "2e-3 -> 0" --discount 0.98 --gae-lambda 0.9 \
		--horizon 32 --minibatches 4 --run-dir runs/demo

# Lint, types and all tests but the slow ones: before a commit.
test: lint types
	$(PYTEST) -m "not slow and not long"

# Lint, types and all tests but those that take minutes: what CI runs.
test-all: lint types
	$(PYTEST) -m "not long"

# The tests that take minutes each: whole learning runs of a world model, campaigns of interruptions. Compiled as users'
# programs are. Before a release.
test-long: $(DEV)
	XLA_FLAGS=--xla_backend_optimization_level=3 $(PYTEST) -m long

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(DEV)
	$(BIN)/mypy --num-workers 2

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Speed, as ratios measured in one run. bench/references.py and bench/annealing.py measure learning; they take minutes.
bench: $(RUN)
	$(BIN)/python bench/schedules.py
	$(BIN)/python bench/ppo.py

# The pictures in docs/, drawn again from the texts in the page.
figures: $(RUN)
	$(BIN)/python docs/figures.py

# The site, from the pages in docs/, into site/. Needs no network.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The site at http://localhost:8000, built again whenever a page changes.
docs-serve: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

# uv installs in a fifth of pip's time, and is told where pip's settings look for packages; pip installs what uv cannot.
# Neither compiles modules, most of which are never imported: Python does that once, when they first are.
PIP := $(BIN)/python -m pip
define install
	$(PIP) install --quiet --disable-pip-version-check uv && \
		UV_FIND_LINKS="$$(echo $${PIP_FIND_LINKS:-$$($(PIP) config get global.find-links 2>/dev/null)} | tr ' ' ',')" \
		UV_DEFAULT_INDEX="$${PIP_INDEX_URL:-$$($(PIP) config get global.index-url 2>/dev/null)}" \
		$(BIN)/uv pip install --quiet --python $(BIN)/python --editable "$(1)" || \
		$(PIP) install --quiet --disable-pip-version-check --no-compile --editable "$(1)"
endef
unexport PYTHONDONTWRITEBYTECODE

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lehr needs Python 3.11 or newer; say which with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(RUN): pyproject.toml | $(BIN)/python
	$(call install,.)
	touch $@

$(DEV): pyproject.toml | $(BIN)/python
	$(call install,.[dev])
	touch $(RUN) $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# Each target does its own set-up: a fresh clone and Python 3.11 or newer are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types check format bench figures clean

# A schedule drawn in the terminal, and its picture in schedule.png.
demo: $(STAMP)
	$(BIN)/lehr schedule "warmup 5%, 0.03 -> 0.001 cosine" "0.03 -> 0.003 cosine repeat 4" --total 1M --plot schedule.png

# Lint, types and tests: what CI runs.
test: lint types check

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: $(STAMP)
	$(BIN)/python -m pytest -n 2 -q

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python bench/schedules.py

# The pictures in docs/, drawn again from the texts in the page.
figures: $(STAMP)
	$(BIN)/python docs/figures.py

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lehr needs Python 3.11 or newer; say which with make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

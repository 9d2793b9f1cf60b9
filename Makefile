# Every target brings up .venv by itself. The pinned versions are in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP := .venv/.ready
LIGHT := .venv/.light
# What is printed is seen at once, in a pipe too.
export PYTHONUNBUFFERED = 1

.PHONY: setup demo test test-slow test-extras test-wheel lint type bench cookbook docs clean

setup: $(STAMP)

# What the demo needs, and nothing else; the tests need more.
$(LIGHT): pyproject.toml constraints.txt
	@echo "Setting up .venv: 60 packages, 410 MB on the disk."
	$(PYTHON) -m venv .venv
	$(PIP) -e ".[langchain]" bm25s xllamacpp
	touch $(LIGHT)

$(STAMP): $(LIGHT)
	$(PIP) torch
	$(PIP) -e ".[dev]"
	touch $(STAMP)

demo: $(LIGHT)
	$(BIN)/rgate download smollm2-135m-reader multilingual-e5-small encyclopedia-leads
	$(BIN)/python cookbook/demo.py

test: $(STAMP)
	$(BIN)/rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Longer runs: full sizes, and whole servers, clusters and processes.
test-slow: $(STAMP)
	$(BIN)/rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small
	$(BIN)/python -m pytest -m slow

test-extras:
	PYTHON=$(PYTHON) tests/extras.sh

# The wheel in an empty environment, with one extra at a time: make test-wheel EXTRAS="core langchain"
test-wheel:
	PYTHON=$(PYTHON) tests/wheel.sh $(EXTRAS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

type: $(STAMP)
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini

bench: $(STAMP)
	$(BIN)/rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small encyclopedia-leads
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/index.py
	$(BIN)/python benchmarks/end_to_end.py --limit 40 $(if $(DATA),--data $(DATA))

# Runs every notebook from scratch and keeps its output beside the script.
cookbook: $(STAMP)
	$(PIP) -e ".[cookbook]"
	$(BIN)/rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small
	cd cookbook && for n in 0*.py; do \
	  PYTHONWARNINGS=ignore ../$(BIN)/jupytext --quiet --to ipynb --execute --set-kernel python3 "$$n" || exit 1; done

# The site, in build/site; a link that leads nowhere or a name that is not documented ends it.
docs: $(STAMP)
	$(PIP) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache benchmarks/out

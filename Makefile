# The README's commands. Each target that needs the environment makes it first.
VENV ?= .venv
PY := $(VENV)/bin/python
PYTHON ?= python3
# Set to run pytest on a part, e.g. make test ARGS="tests/control -x"
ARGS ?=

.PHONY: demo test lint types check picture bench clean

demo: $(VENV)/.ready
	$(VENV)/bin/trimtab demo

test: $(VENV)/.ready
	$(PY) -m pytest $(ARGS)

lint: $(VENV)/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/.ready
	$(PY) -m mypy

check: lint types test

bench: $(VENV)/.ready
	$(PY) benchmarks/decision.py
	$(PY) benchmarks/formats.py
	$(PY) benchmarks/step.py
	$(PY) benchmarks/memory.py
	$(PY) benchmarks/paths.py
	$(PY) benchmarks/monitors.py
	$(PY) benchmarks/spectrum.py
	$(PY) benchmarks/replay.py

# The README's picture, from the records of the last demo. Drawing it needs Chrome or Chromium on the machine.
picture: $(VENV)/.ready
	$(PY) -m pip install --quiet -c constraints.txt -e '.[plots]'
	$(PY) -m trimtab.experiments.picture runs/demo docs/demo.svg

# constraints.txt pins torch, so that no other build of it is pulled in by a dependency.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

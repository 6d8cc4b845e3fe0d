# make serve   installs into .venv and serves configs/cluster.yaml in the foreground
# make monitor Prometheus, and Grafana where it is installed, beside `make serve`
# make test    installs what tests need and runs what is worth running at every change
# make test-all that, and the long suites
# make check   linters, types, import and size rules, the documentation's links
# make docs    the documentation as a site, in build/site
#
# CONFIG=path      another cluster
# PROXY=ray        Ray Serve's own proxy in place of HAProxy, which is faster (Linux)
# SERVE_ARGS=...   more options of `kedge serve`, e.g. the address of a Ray cluster
# MONITOR_ARGS=... options of configs/monitoring/monitor.py: where Kedge is, other ports
# PYTHON=python3.x another interpreter (3.11 or newer)
# PIP_ARGS=...     more arguments to pip, e.g. an index with CPU builds of torch, which are taken where pip finds them
# JOBS=2           processes that share the tests; those that start a cluster run one by one
# TEST_ARGS=...    pytest's arguments, for one run of what they name

PYTHON ?= python3
CONFIG ?= configs/cluster.yaml
PROXY ?=
SERVE_ARGS ?=
MONITOR_ARGS ?=
PIP_ARGS ?=
JOBS ?= 2
TEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps

# The locks alone say what is installed, and each file must have one of their hashes. The project is linked in place, by
# the setuptools of the lock. Only a CPU build of torch, where pip is told of an index that has one, is that index's own.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LOCKED := $(PIP) install $(PIP_ARGS) --no-deps --require-hashes
CPU_TORCH := $(PIP) install $(PIP_ARGS) --no-deps torch==$(shell sed -n 's/^torch==\([^ ;]*\).*/\1/p' requirements.lock)+cpu
IS_CPU_TORCH := 'import importlib.metadata as m, sys; sys.exit("+cpu" not in m.version("torch"))'

.PHONY: serve monitor test test-all check docs format install install-dev clean
.DELETE_ON_ERROR:

serve: install
	$(BIN)/kedge serve $(CONFIG) $(if $(PROXY),--proxy $(PROXY)) $(SERVE_ARGS)

monitor:
	$(PYTHON) configs/monitoring/monitor.py $(MONITOR_ARGS)

# A cluster takes the whole machine: its tests run one by one.
SHARED := $(BIN)/python -m pytest --durations=10 --numprocesses $(JOBS) --dist loadfile --ignore=tests/cluster --ignore=tests/clients --ignore=tests/console
ALONE := $(BIN)/python -m pytest --durations=10 tests/cluster tests/clients tests/console

test: install-dev
ifdef TEST_ARGS
	$(BIN)/python -m pytest $(TEST_ARGS)
else
	$(SHARED) -m "not slow"
	$(ALONE) -m "not slow"
endif

test-all: install-dev
	$(SHARED)
	$(ALONE)

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/architecture

docs: $(STAMPS)/docs
	$(BIN)/sphinx-build -q -W --keep-going -c docs/site -d build/site-sources . build/site
	@echo build/site/index.html

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What the project's own C files are: setup.py compiles them where there is a compiler.
KERNELS := $(wildcard engine/cpu/source/*.[ch])

install: $(STAMPS)/run
install-dev: $(STAMPS)/dev

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/run: requirements.lock requirements-cuda.lock pyproject.toml setup.py $(KERNELS) $(STAMPS)/venv
	if $(CPU_TORCH) --dry-run >/dev/null 2>&1; then $(CPU_TORCH); fi
	$(LOCKED) -r requirements.lock
	$(BIN)/python -c $(IS_CPU_TORCH) || $(LOCKED) -r requirements-cuda.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	$(BIN)/python -m engine.cpu
	$(PIP) check
	touch $@

# The site needs nothing of the project's: who writes documentation installs no torch.
$(STAMPS)/docs: requirements-docs.lock $(STAMPS)/venv
	$(LOCKED) -r requirements-docs.lock
	touch $@

$(STAMPS)/dev: requirements-dev.lock $(STAMPS)/run $(STAMPS)/docs
	$(LOCKED) -r requirements-dev.lock
	$(PIP) check
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache *.egg-info

# make serve    installs into .venv and serves configs/cluster.yaml in the foreground
# make monitor  runs Prometheus, and Grafana if it is installed, beside `make serve`
# make test     installs what the tests need and runs the tests for every change
# make test-all runs these and the long suites: those without a cluster, and then those with one
# make check    runs linters, types, import and size rules, and checks the documentation's links
# make docs     builds the documentation as a site, in build/site
#
# CONFIG=path      another cluster's file
# PROXY=ray        Ray Serve's own proxy instead of HAProxy (HAProxy is faster; Linux only)
# SERVE_ARGS=...   more options of `kedge serve`, e.g. the address of a Ray cluster
# MONITOR_ARGS=... options of configs/monitoring/monitor.py: where Kedge is, other ports
# PYTHON=python3.x another interpreter (3.11 or newer)
# PIP_ARGS=...     more arguments to pip, e.g. an index with CPU builds of torch, which are used if pip finds them
# JOBS=3           processes that share the tests; tests that start a cluster run one by one
# TEST_ARGS=...    arguments of pytest, to run only the tests that they name
# MARKS=slow       of the tests without a cluster, only those with this mark; "not slow" for all others. Of the slow ones,
#                  some wait more than they compute, and have the mark waits, too

PYTHON ?= python3
CONFIG ?= configs/cluster.yaml
PROXY ?=
SERVE_ARGS ?=
MONITOR_ARGS ?=
PIP_ARGS ?=
JOBS ?= 3
TEST_ARGS ?=
MARKS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps

# The locks alone say what is installed, and each file must have one of their hashes. The setuptools of the lock link the
# project in place. The one exception is a CPU build of torch: if pip knows an index that has it, it comes from there.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LOCKED := $(PIP) install $(PIP_ARGS) --no-deps --no-compile --require-hashes
CPU_TORCH := $(PIP) install $(PIP_ARGS) --no-deps --no-compile torch==$(shell sed -n 's/^torch==\([^ ;]*\).*/\1/p' requirements.lock)+cpu
# What is not compiled here, each process of the first start would compile. pip would do it on one core, which is half of
# its work. A few files of packages are for later versions of Python and do not compile.
COMPILE := $(BIN)/python -m compileall -qq -j 0
COMPILE_PACKAGES := $(COMPILE) $(VENV)/lib || true
IS_CPU_TORCH := 'import importlib.metadata as m, sys; sys.exit("+cpu" not in m.version("torch"))'

.PHONY: serve monitor test test-all test-without-clusters test-with-clusters check docs format install install-dev clean
.DELETE_ON_ERROR:

serve: install
	$(BIN)/kedge serve $(CONFIG) $(if $(PROXY),--proxy $(PROXY)) $(SERVE_ARGS)

monitor:
	$(PYTHON) configs/monitoring/monitor.py $(MONITOR_ARGS)

# Two clusters at a time are too many, so their tests run one by one. Those of the architecture are part of `make check`.
WITHOUT_CLUSTERS := $(BIN)/python -m pytest --durations=10 --numprocesses $(JOBS) --dist loadfile --ignore=tests/architecture --ignore=tests/cluster --ignore=tests/clients --ignore=tests/console
WITH_CLUSTERS := $(BIN)/python -m pytest --durations=60 --durations-min=4 tests/cluster tests/clients tests/console

test: install-dev
ifdef TEST_ARGS
	$(BIN)/python -m pytest $(TEST_ARGS)
else
	$(WITHOUT_CLUSTERS) -m "not slow"
	$(WITH_CLUSTERS) -m "not slow"
endif

test-all: test-without-clusters test-with-clusters

test-without-clusters: install-dev
	$(WITHOUT_CLUSTERS) -m "$(MARKS)"

test-with-clusters: install-dev
	$(WITH_CLUSTERS)

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

# The project's own C files. setup.py compiles them if there is a compiler.
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
	$(COMPILE_PACKAGES)
	$(COMPILE) cache controllers engine serving
	touch $@

# The site needs none of the project's dependencies, so writers of documentation need no torch.
$(STAMPS)/docs: requirements-docs.lock $(STAMPS)/venv
	$(LOCKED) -r requirements-docs.lock
	touch $@

$(STAMPS)/dev: requirements-dev.lock $(STAMPS)/run $(STAMPS)/docs
	$(LOCKED) -r requirements-dev.lock
	$(PIP) check
	$(COMPILE_PACKAGES)
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache *.egg-info

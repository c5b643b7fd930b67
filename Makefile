# Every target sets up what it needs in .venv; a machine with Python 3.11 or later, pip, venv and make is enough.
#
#   make demo     install the light package (no torch) and watch it work          under a minute
#   make test     lint, types, architecture and a sample of the tests             six to seven minutes on two cores
#   make test ROOM=formats/dcp   the tests that exercise one folder of the source, in seconds
#   make test SEED=20261118      the sample of another day; it is printed with every failure
#   make test-kernel   the kernel's tests on a copy of the source without extras (ARGS='-k golden')
#   make test-all every case of every test                                        hours
#   make mutations  break 30 random places of the source, and count what the tests notice; hours (ARGS=--resume goes on)
#   make costs    measure what the tests cost and which rooms they exercise; needs PYTHON=python3.12
#   make test TORCH=2.15.0 [NUMPY=1.26.4]   all tests with another torch, in a .venv of its own
#   make matrix   all tests with the oldest, the newest and some of the torches between; an hour and 6 GB each, by hand
#   make check    lint, types and architecture only
#   make browser  the browser that tests/browser draws pages in, where it may be installed
#   make platforms  types as a checker on macOS and on Windows sees them
#   make bench    the benchmarks, as ratios against torch and safetensors
#   make test-integrations   the adapters, each with its framework, in a .venv of their own
#   make programs other people's tests and examples, with torch and with Holdfast in its place (an hour; the package registry)
#   make dist     the source distribution and the wheel in dist/, each tried in an empty environment
#   make pages    run the blocks of README and docs, and rewrite what they show of their output (ARGS=docs/cli.md: one page)
#   make docs     the site, in build/site; a broken link or a public name without words fails it
#   make golden   write the golden files again, with torch and safetensors
#   make clean    remove .venv and everything that was built

PYTHON ?= python3
# The pinned torch is the default, and CI's. Any other has a folder of its own, and so has another numpy than pip would choose.
PINNED := $(shell sed -n 's/^torch==//p' requirements/torch.txt)
TORCH  ?= $(PINNED)
NUMPY  ?=
VENV   := .venv$(if $(filter-out $(PINNED),$(TORCH)),-$(TORCH))$(if $(NUMPY),-numpy-$(NUMPY))
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check
# How many test processes; one a core at most.
JOBS   ?= 2

MADE  := $(VENV)/.made
LIGHT := $(VENV)/.light
FULL  := $(VENV)/.full

.DEFAULT_GOAL := help
.PHONY: help demo browser test test-all test-kernel costs mutations test-integrations matrix check lint types platforms architecture bench programs dist pages docs golden clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(LIGHT)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/demo.sh

# Debian's, with its package manager; who may not install it is told, and `make test` then skips the tests of pages.
browser:
	@for name in $$HOLDFAST_CHROMIUM chromium chromium-browser google-chrome; do if command -v $$name; then exit 0; fi; done; \
	if test "$$(id -u)" = 0 && command -v apt-get > /dev/null; \
	then apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends chromium; \
	else echo "there is no chromium: install it (Debian: sudo apt-get install chromium), or set HOLDFAST_CHROMIUM to a browser" >&2; exit 1; fi

# The tests of one room, or those of all rooms after lint and types. mypy and ruff check the code with
# the pinned torch only: the types of others differ, and the code is the same.
ROOM   ?=
SEED   ?=
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout 300
SLOWEST := --durations 20 --durations-min 2

test: $(if $(ROOM),$(FULL),$(if $(filter-out $(PINNED),$(TORCH)),$(FULL),lint types))
ifneq ($(ROOM),)
	@files=$$($(BIN)/python -m tests.rooms $(ROOM)) && \
	$(PYTEST) --in-a-room $(if $(SEED),--sample-seed $(SEED)) $(ARGS) $$files
else
	@echo "== tests"
	@$(PYTEST) $(SLOWEST) $(if $(SEED),--sample-seed $(SEED)) $(ARGS)
endif

# The sample of the day of the kernel's tests.
test-kernel: $(FULL)
	@echo "== tests of the kernel, without extras"
	@$(BIN)/python tools/test_kernel.py -n $(JOBS) --dist worksteal --timeout 300 $(ARGS)

test-all: lint types
	@echo "== tests, every case"
	@$(PYTEST) $(SLOWEST) --exhaustive $(ARGS)

# How many of 30 random faults in the source the tests notice; about two hours. It can be interrupted:
# make mutations ARGS=--resume
mutations: $(FULL)
	@PYTHONPATH=. $(BIN)/python tools/mutate.py $(ARGS)

# Python 3.12 or later tells cheaply which lines a test runs: make costs VENV=.venv-3.12 PYTHON=python3.12
costs: $(FULL)
	@mkdir -p build/test-records && rm -f build/test-records/*
	@PYTHONPATH=.:tools HOLDFAST_TEST_RECORDS=build/test-records $(PYTEST) -p measure_tests $(ARGS)
	@PYTHONPATH=. $(BIN)/python tools/measure_tests.py build/test-records

# torch first and alone, as below; the frameworks take the one that is there.
test-integrations:
	@$(MAKE) --no-print-directory VENV=.venv-integrations .venv-integrations/.full
	@.venv-integrations/bin/python -m pip install -qq --disable-pip-version-check --requirement requirements/integrations.txt
	@.venv-integrations/bin/python -m pip install -qq --disable-pip-version-check --no-deps --requirement requirements/integrations-alone.txt
	@.venv-integrations/bin/python -m pytest --timeout 300 tests/integrations tests/ranks/test_dcp_storage.py tests/ranks/test_dcp_torch.py $(ARGS)

matrix:
	@$(PYTHON) tools/matrix.py $(ARGS)

check: lint types architecture

lint: $(FULL)
	@echo "== lint"
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --check .

types: $(FULL)
	@echo "== types"
	@$(BIN)/mypy --strict --no-error-summary src

platforms: $(FULL)
	@echo "== types on macOS and Windows"
	@$(BIN)/mypy --strict --no-error-summary --platform darwin src
	@$(BIN)/mypy --strict --no-error-summary --platform win32 src

architecture: $(FULL)
	@echo "== architecture"
	@$(BIN)/python -m pytest tests/test_architecture.py $(ARGS)

bench: $(FULL)
	@$(BIN)/python -m benchmarks $(ARGS)

# A virtual environment of its own, and everything that is not ours, under .cache/programs.
programs: $(MADE)
	@$(BIN)/python tools/programs $(ARGS)

dist: .venv-dist/.made
	@tools/dist.sh .venv-dist/bin/python

.venv-dist/.made: requirements/dist.txt
	@$(PYTHON) -m venv .venv-dist
	@.venv-dist/bin/python -m pip install -qq --disable-pip-version-check --requirement requirements/dist.txt
	@touch $@

pages: $(FULL)
	@$(BIN)/python -m tests.page_rewriter $(ARGS)

# Needs no torch: names and docstrings are read from the source.
docs: .venv-docs/.made
	@PYTHONPATH=src .venv-docs/bin/python tools/site build/pages
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@echo "build/site/index.html (with its search: python3 -m http.server --bind 127.0.0.1 --directory build/site)"

.venv-docs/.made: requirements/docs.txt pyproject.toml
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -qq --disable-pip-version-check --editable . --requirement requirements/docs.txt
	@touch $@

golden: $(FULL)
	@$(BIN)/python tests/golden/make.py

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Holdfast needs Python 3.11 or later; try make PYTHON=python3.12")'
	@test -x $(BIN)/python || { echo "== creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@touch $@

$(LIGHT): pyproject.toml | $(MADE)
	@echo "== installing holdfast (no torch)"
	@$(PIP) --editable . $(if $(NUMPY),numpy==$(NUMPY))
	@touch $@

# torch first and alone, so that nothing else can choose another version.
$(FULL): $(LIGHT) requirements/torch.txt requirements/test.txt requirements/lint.txt
	@echo "== installing torch $(TORCH) and the test tools (once)"
	@$(PIP) $(if $(filter $(PINNED),$(TORCH)),--requirement requirements/torch.txt,torch==$(TORCH)) $(if $(NUMPY),numpy==$(NUMPY))
	@$(PIP) --requirement requirements/test.txt --requirement requirements/lint.txt
	@touch $@

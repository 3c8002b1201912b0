# make lab    runs the lab; make test passes the tests. Each makes .venv first when it has to.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first Python that is new enough. PYTHON=/path/to/python3 names another one.
ifeq ($(origin PYTHON),undefined)
CHOSEN :=
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; \
  done)
else
CHOSEN := --this-python
endif

BIN := .venv/bin

.PHONY: help lab test doctor lint format report jupyter lock env clean

help:
	@echo 'make lab      run the lab: notebooks, HTML report, headline numbers   ARGS="06 -p name=value"'
	@echo 'make test     run the tests                                           ARGS="-k merge"'
	@echo 'make doctor   say what this machine can do and what is missing'
	@echo 'make report   kernels built for gfx942 and gfx950: registers, spills, MFMA'
	@echo 'make jupyter  open the notebooks in JupyterLab'
	@echo 'make lint     ruff and the notebook checks       make format   let ruff mend'
	@echo 'make lock     renew constraints/*.txt            make clean    remove build/ and caches'
	@echo
	@echo 'DCP_LAB_MACHINE=cpu|cuda|rocm make lab   takes that kind of machine instead of the one seen'
	@echo 'make lab PYTHON=python3.12               makes a new .venv from that Python'

lab: env
	@$(BIN)/dcp-lab run $(ARGS)

test: env
	@$(BIN)/python -m pytest $(ARGS)

doctor: env
	@$(BIN)/dcp-lab doctor $(ARGS)

report: env
	@$(BIN)/dcp-lab amd-report $(ARGS)

jupyter: env
	@$(BIN)/jupyter lab --ip=127.0.0.1 notebooks

lint: env
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/python tools/check_notebooks.py || status=1; \
	exit $$status

format: env
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: env
	@$(BIN)/python tools/lock.py

env:
	@test -n "$(PYTHON)" || { \
	  echo "dcp_lab needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || echo none)." >&2; \
	  echo "Install one, or name it: make lab PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) tools/setup_env.py $(CHOSEN)

clean:
	rm -rf build .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# Two commands for a fresh machine with python3.11, make and gcc:
#   make demo   serve a small model through this backend and ask it something
#   make test   the whole test suite
# Both set up .venv by themselves.

PYTHON ?= python3.11
VENV := .venv
READY := $(VENV)/.ready
MODEL := models/smollm2-135m
# more arguments for pytest, as in: make test PYTEST_ARGS="-k decode"
PYTEST_ARGS ?=
# test files at a time; each uses one core, and a model one or two gigabytes
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test releases test-fast lint format doctor clean

help:
	@echo "make demo       serve SmolLM2-135M with NUMA_SWIZZLE and ask it a question"
	@echo "make test       all tests (sets everything up; below 30 minutes on two cores)"
	@echo "make test-fast  the tests that start no model"
	@echo "make lint       ruff: rules and format"
	@echo "make format     let ruff rewrite the files"
	@echo "make doctor     what is installed, what would be chosen, what is wrong"
	@echo "make clean      remove environments, models and caches"

$(READY): pyproject.toml tools/environment.py
	@$(PYTHON) tools/environment.py
	@touch $@

$(MODEL)/config.json: | $(READY)
	@$(VENV)/bin/numa-swizzle checkpoint $(MODEL)

demo: $(READY) $(MODEL)/config.json
	@$(VENV)/bin/numa-swizzle demo $(MODEL)

# NUMA_TEST_ALL_RELEASES: a release that is not there fails its tests instead of skipping them
test: $(READY) $(MODEL)/config.json releases
	@NUMA_TEST_ALL_RELEASES=1 $(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

releases: $(READY)
	@$(PYTHON) tools/environment.py releases

test-fast: $(READY)
	@$(VENV)/bin/python -m pytest -m "not model" $(PYTEST_ARGS)

lint: $(READY)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

format: $(READY)
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

doctor: $(READY)
	@$(VENV)/bin/numa-swizzle doctor

clean:
	rm -rf .venv .venv-* models .pytest_cache .ruff_cache .hypothesis

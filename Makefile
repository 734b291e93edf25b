# Every target sets up what it needs first; the second time that takes a moment.
PYTHON ?= python3
LMSRUN_VENV ?= .venv
TENSORFLOW ?= 2.21
export LMSRUN_VENV TENSORFLOW

BIN := $(LMSRUN_VENV)/bin
PYTEST_ARGS ?=
BENCH_LMS := out/bench-lms.json
BENCH_BITS := out/bench-bits.json

.PHONY: help setup demo docs pictures test quick man test-oldest check lint bench fuzz bench-lms bench-bits bench-peers bench-gpu clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | sort

setup:  ## .venv with TensorFlow, Horovod (compiled once, then cached) and the tools
	@$(PYTHON) scripts/setup.py

demo: setup  ## a batch that needs Large Model Support, on two bound Horovod ranks; a minute or two
	@$(BIN)/python scripts/demo.py

docs: setup  ## the documentation as a site in out/site, readable without a network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "docs: open out/site/index.html"

test: setup  ## all tests
	@$(BIN)/python scripts/cluster_tools.py
	$(BIN)/python scripts/run_tests.py $(PYTEST_ARGS)

quick: setup  ## what a developer runs after each change: no process that imports TensorFlow, no rank; under two minutes
	$(BIN)/python -m pytest -q -n 2 -m "not tensorflow and not ranks and not vm and not cluster and not containers and not slow" \
		tests/lms tests/test_architecture.py

man: setup  ## docs/man from the declared options
	@$(BIN)/python scripts/man_pages.py

test-oldest:  ## the tests of lms/ on TensorFlow 2.15.1, in .venv-tf215
	@LMSRUN_VENV=.venv-tf215 TENSORFLOW=2.15.1 $(PYTHON) scripts/setup.py
	.venv-tf215/bin/python -m pytest tests/lms $(PYTEST_ARGS)

lint: setup  ## style, format, types, oldest Python that can read the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy scripts
	$(BIN)/vermin --quiet --no-tips --target=3.10- --violations lmsrun launch lms scripts
	$(BIN)/vermin --quiet --no-tips --target=3.6- --violations lms/bootstrap
	$(BIN)/python -m pytest -q tests/docker/test_container_files.py  # hadolint and shellcheck

check: lint test  ## lint, then all tests

pictures: setup  ## the pictures of README.md
	@$(BIN)/python scripts/pictures.py

bench: setup  ## start-up against horovodrun and mpirun
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/scale.py

fuzz: setup  ## every parser of outside input, a million executions each, guided by coverage; an hour or more
	$(BIN)/python bench/fuzz.py

bench-lms: setup  ## the largest batch with and without Large Model Support, and what it costs; hours
	$(BIN)/python bench/lms.py --out $(BENCH_LMS)
	$(BIN)/python bench/lms_edit.py --out $(BENCH_LMS)
	$(BIN)/python bench/lms_idle.py --out $(BENCH_LMS)
	-$(BIN)/python bench/lms_sim.py --out $(BENCH_LMS)
	@if LMSRUN_VENV=.venv-tf215 TENSORFLOW=2.15.1 $(PYTHON) scripts/setup.py; then \
		$(BIN)/python bench/lms.py --out $(BENCH_LMS) --python .venv-tf215/bin/python --what memory --goal-only && \
		$(BIN)/python bench/lms_edit.py --out $(BENCH_LMS) --python .venv-tf215/bin/python --models resnet50 --keras 2; \
	else echo "bench-lms: goes on without TensorFlow 2.15, see above"; fi
	@$(BIN)/python bench/lms.py --out $(BENCH_LMS) --what table

bench-bits: setup  ## whether training ends in the same bits with Large Model Support; goes on where it stopped; hours
	$(BIN)/python bench/bits.py --out $(BENCH_BITS)

bench-peers: setup  ## Large Model Support beside other ways to save memory; goes on where it stopped; an hour
	$(BIN)/python bench/peers.py --out out/bench-peers.json

bench-gpu: setup  ## models of full size on a CUDA machine; eight minutes, goes on where it stopped
	$(BIN)/python bench/gpu_lms.py --out out/bench-gpu.json

clean:  ## remove what was built here, the environment too (the cached Horovod wheel stays)
	rm -rf $(LMSRUN_VENV) $(LMSRUN_VENV)-setup.log $(LMSRUN_VENV)-setup.lock build dist *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find lmsrun launch lms tests bench examples scripts -name __pycache__ -prune -exec rm -rf {} +

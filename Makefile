# Every target brings the environment it needs up to date first: .venv for the
# default PyTorch, .venv-VERSION for another. `make help` lists them.

PYTHON ?= python3
# A release of PyTorch such as 2.15.0; empty: the usual ones of the target.
BASE ?=
# Arguments for pytest, for example ARGS="-k deprecation -x".
ARGS ?=
# A part of the name of a benchmark, for example BENCH=import.
BENCH ?=

on_base = $(if $(BASE),--base $(BASE))
venv = $(if $(filter-out 2.13.0,$(BASE)),.venv-$(BASE),.venv)

.PHONY: help demo build test test-all test-cuda bench docs lint clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1:\2/p' $(MAKEFILE_LIST) | \
	  awk -F: '{ printf "  %-14s %s\n", $$1, $$2 }'
	@echo "  BASE=2.15.0 chooses a PyTorch for demo, build, test and bench;"
	@echo "  ARGS=\"-k NAME\" goes to pytest, BENCH=NAME chooses a benchmark."

demo: ## install PyTorch, build, and train on pinned batches
	@$(PYTHON) tools/make_env.py $(on_base) --with demo
	@$(venv)/bin/python tools/demo.py

build: ## build torchpin and the reference accelerator, for development
	@$(PYTHON) tools/make_env.py $(on_base) --with test
	@$(venv)/bin/python -m torchpin --import torch_refdev

test: ## the whole test suite on PyTorch 2.3.1 and 2.13.0, or on BASE
	@$(PYTHON) tools/run_tests.py $(BASE) --pytest='$(ARGS)'

test-all: ## the whole test suite on every PyTorch of tools/requirements
	@$(PYTHON) tools/run_tests.py --all --pytest='$(ARGS)'

test-cuda: ## what is written for any accelerator, on CUDA without a GPU; on PyTorch 2.9.1 or BASE
	@$(PYTHON) tools/make_env.py --base $(or $(BASE),2.9.1) --with test
	@.venv-$(or $(BASE),2.9.1)/bin/python test/cudart_on_cpu.py $(ARGS)

bench: ## every benchmark of tools/bench, or those named by BENCH
	@$(PYTHON) tools/make_env.py $(on_base) --with test $(if $(BASE),,--with rivals)
	@for file in tools/bench/bench_*$(BENCH)*.py; do \
	  echo "== $$file" && $(venv)/bin/python $$file </dev/null || exit 1; done

docs: ## the documentation, into docs/build/html; a warning is an error
	@$(PYTHON) tools/make_env.py --no-build --with docs
	@.venv/bin/python -m sphinx -q -W --keep-going -b html docs/source docs/build/html
	@echo "docs/build/html/index.html"

lint: ## clang-format, ruff and mypy
	@$(PYTHON) tools/make_env.py --no-build --with lint --with test
	@.venv/bin/python tools/lint.py

clean: ## remove what was built; environments stay
	@rm -rf build docs/build test/cpp_extensions/*/build .mypy_cache .ruff_cache .pytest_cache
	@rm -f .venv*/stamps/torchpin .venv*/stamps/torch_refdev

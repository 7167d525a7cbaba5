# Both of README's commands, `make demo` and `make test`, create and share .venv; see CONTRIBUTING.md for the rest.

PYTHON ?= python3
PORT ?= 8000
ARGS ?=
VENV_PYTHON := .venv/bin/python

# The question reaches the script through the environment exactly as it was typed: neither make nor the shell expands it.
export DEMO_QUESTION := $(value QUESTION)
unexport QUESTION

.PHONY: help demo demo-stop test lint gpu-check ascend-check clean venv

help:
	@echo 'make demo          serve a real model with 4-bit experts and ask it a question (QUESTION="..." for another)'
	@echo 'make demo-stop     end the server that the demo left running'
	@echo 'make test          run the tests (ARGS="tests/ops -x" for some of them)'
	@echo 'make lint          ruff and mypy'
	@echo 'make gpu-check     run the checks of benchmarks/gpu_checks on this machine'"'"'s CUDA device'
	@echo 'make ascend-check  compile the Ascend C kernels with the CANN in ASCEND_HOME_PATH, compare the NPU with the simulator'
	@echo 'make clean         remove .venv, .demo and caches'

venv:
	@$(PYTHON) tools/setup_venv.py

demo: venv
	@$(VENV_PYTHON) tools/demo.py --port $(PORT)

demo-stop:
	@$(PYTHON) tools/demo.py --stop

test: venv
	$(VENV_PYTHON) -m pytest $(ARGS)

lint: venv
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy vllm_ext benchmarks

gpu-check:
	@$(PYTHON) tools/gpu_check.py

ascend-check:
	@failed=0; $(PYTHON) tools/ascend_check.py || failed=1; $(PYTHON) tools/ascend_smoke.py || failed=1; exit $$failed

clean: demo-stop
	rm -rf .venv .demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

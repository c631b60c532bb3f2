# Two commands matter: `make up` starts the whole product here, `make test` runs every check.
# Everything else is a part of one of them; `make help` lists all.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help up venv venv-dev chromium sshd test lint format types fast search outages namespaces rollouts validations rolling vllm engines cuda browser screenshots clean

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
WORKERS ?= 2
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pip's own byte-compiling is one process; leaving it to first use costs each process a little.
export PYTHONUNBUFFERED := 1

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

up: venv ## Start stores, control plane, gateway and agents. Options: make up ARGS="--nodes 2 --load"
	@exec $(BIN)/python manage.py up $(ARGS)

venv: ## Create .venv and install what the product needs, if the pins changed.
	@.ci/venv "$(VENV)" requirements.txt "$(PYTHON)"

venv-dev: ## The same with what tests, lint and types need.
	@.ci/venv "$(VENV)" requirements-dev.txt "$(PYTHON)"

chromium: ## Install Chromium for the browser tests, by apt, if root; else say how.
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then exit 0; fi
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
		echo "Chromium is missing, so the browser tests will be skipped. To run them: sudo apt-get install chromium"
		exit 0
	fi
	echo "Installing Chromium for the browser tests ..."
	( apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null ) \
		|| echo "apt could not install Chromium, so the browser tests will be skipped."

sshd: ## Install OpenSSH's server for the tests of SSH, by apt, if root; else say how. It is not started.
	@if command -v sshd >/dev/null || [ -x /usr/sbin/sshd ]; then exit 0; fi
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
		echo "sshd is missing, so the tests of SSH will be skipped. To run them: sudo apt-get install openssh-server"
		exit 0
	fi
	( apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openssh-server >/dev/null ) \
		|| echo "apt could not install openssh-server, so the tests of SSH will be skipped."

lint: venv-dev ## Format check, lint and import contracts.
	@echo "== format";    $(BIN)/ruff format --check .
	echo "== lint";      $(BIN)/ruff check .
	echo "== contracts"; $(BIN)/lint-imports

format: venv-dev ## Format and fix what can be fixed.
	@$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: venv-dev ## mypy, strict.
	@echo "== types"; $(BIN)/mypy

fast: venv-dev ## The tests that need no stores, processes or browser.
	@$(BIN)/python -m pytest tests/domain tests/protocol $(ARGS)

test: venv-dev chromium sshd lint types ## Everything: lint, contracts, types, then all tests.
	@echo "== tests"
	$(BIN)/python -m pytest -p tests.scheduling -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

search: venv-dev ## The tests that draw their examples, with examples never tried before.
	@$(BIN)/python -m pytest $$(grep -rl "from hypothesis" tests --include="test_*.py") -n $(WORKERS) \
		-p no:rerunfailures --hypothesis-profile="new examples" $(ARGS)

outages: venv-dev ## Take stores, leaders and nodes away, and see the fleet come back: minutes.
	@$(BIN)/python -m pytest -m outage tests/system $(ARGS)

namespaces: venv-dev ## Weights and pipeline stages over slow and cut links that are made for it, with faults: minutes. Needs root.
	@$(BIN)/python -m pytest -m namespaces tests/weights tests/engines tests/agent $(ARGS)

rollouts: venv-dev ## Roll releases over 256 simulated nodes with faults, 1,000 times: half an hour. Fewer: EXAOPS_ROLLOUT_SEEDS=50
	@$(BIN)/python -m pytest -m rollouts tests/rollouts/test_rollout_simulation.py -n $(WORKERS) \
		-p no:tests.real_stores -p tests.rollout_figures -q $(ARGS)

rolling: venv-dev ## Roll good and bad releases over real engines under load, and kill what rolls them: 20 minutes.
	@$(BIN)/python -m pytest -m rollouts tests/rollouts/test_rolling_*.py $(ARGS)

vllm: venv-dev ## Real vLLM on the processor, and the parsers of vLLM and SGLang: minutes; installs 3.5 GB once.
	@if [ -z "$${EXAOPS_VLLM_PYTHON:-}" ]; then .ci/foreign-engines .venv-vllm $(BIN)/python; fi
	$(BIN)/python -m pytest -m vllm tests/foreign $(ARGS)

engines: venv-dev chromium ## vLLM and the built-in engine in one fleet, from the pages: 20 minutes. Figures as JSON: ARGS="--figures FILE"
	@if [ -z "$${EXAOPS_VLLM_PYTHON:-}" ]; then .ci/foreign-engines .venv-vllm $(BIN)/python; fi
	$(BIN)/python -m pytest -m engines tests/engines_live -p tests.engine_figures -p no:tests.real_stores $(ARGS)

validations: venv-dev ## Validate the demo model on real engines of a whole fleet, vLLM too where it is: many minutes.
	@$(BIN)/python -m pytest -m validations tests/validation $(ARGS)

cuda: venv-dev ## The tests that need a CUDA device: a minute or two. Skipped, with the reason, without one.
	@$(BIN)/python -m pytest -m cuda tests/cuda -p no:tests.real_stores --log-level=INFO $(ARGS)

browser: venv-dev chromium ## The browser tests only.
	@$(BIN)/python -m pytest tests/browser $(ARGS)

screenshots: venv-dev chromium ## Make the pictures of the README out of a running fleet.
	@$(BIN)/python -m bench.screenshots $(ARGS)

clean: ## Remove caches. The virtual environment and var/ (your data) stay.
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

